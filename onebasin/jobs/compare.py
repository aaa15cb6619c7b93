# SPDX-License-Identifier: Apache-2.0
"""onebasin verify and onebasin distance: what two folders have in common, as functions and as points."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch

from onebasin.engine import refuse_device
from onebasin.models import Canonical, Distances, distances
from onebasin.running import Verification, compare
from onebasin.running.same_tensors import compare_tensors
from onebasin.settings import Seed, checked, refuses_unknown
from onebasin.symmetry import Alignment

from .folders import opened
from .options import ModelSource
from .writing import refuse_wrong_table


@refuses_unknown(more=lambda: [*signature(compare).parameters, *signature(compare_tensors).parameters])
def verify(
    a: ModelSource,
    b: ModelSource,
    *,
    tensors: bool = False,
    alignment: str | Path | None = None,
    family: str | None = None,
    **how: Any,
) -> Verification:
    """Do two models compute the same function? Random valid inputs; see `onebasin.checkpoint.compare`.

    tensors: compare the weights instead, tensor by tensor, see `onebasin.running.same_tensors`; the models are not run
    and need not fit in memory. alignment: the file that `match` saved, by whose maps `b` was made of `a`.
    """
    refuse_device(how.get("device", "cpu"))
    checked(Seed, "seed", how.get("seed", 0))
    if alignment is not None and not tensors:
        raise ValueError("--alignment says what became of the tensors: use it with --tensors")
    with opened([a, b], family) as (first, second):
        if tensors:
            maps = None if alignment is None else Alignment.load(alignment)
            if maps is not None:
                for form in (first, Canonical(first, torch.float64)):  # that maps keep the function, the table says
                    refuse_wrong_table(form)
            return compare_tensors(first, second, maps, **how)
        return compare(first.folder, second.folder, **how)


@refuses_unknown()
def distance(a: ModelSource, b: ModelSource, *, family: str | None = None) -> Distances:
    """Euclidean distance over the parameters that two models share: whole, per part, per layer."""
    with opened([a, b], family) as (first, second):
        return distances(first, second)
