# SPDX-License-Identifier: Apache-2.0
"""onebasin verify and onebasin distance: compare two models, as functions and as points in weight space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from onebasin.engine import Means
from onebasin.models import Canonical, Distances, distances
from onebasin.running import Verification, compare
from onebasin.running.verification import compare_tensors
from onebasin.settings import Seeded, refuses_unknown, take
from onebasin.symmetry import Alignment

from .folders import opened
from .options import ModelSource
from .writing import refuse_wrong_table


@refuses_unknown(Means, Seeded)
def verify(
    a: ModelSource,
    b: ModelSource,
    *,
    tensors: bool = False,
    alignment: str | Path | None = None,
    family: str | None = None,
    tolerance: float | None = None,
    **how: Any,
) -> Verification:
    """Tell whether two models compute the same function: on random inputs, or by their weights.

    Args:
        a: a model.
        b: another.
        tensors: compare the weights, tensor by tensor; the models are not run and need not fit in memory.
        alignment: a file saved by `match`, whose maps turned `a` into `b`.
        family: the table to read both by, for a model type that has none.
        tolerance: of the relative difference (default: what rounding explains).
        how: the fields of `Means`, and the `seed` of the inputs.

    Returns:
        Whether they are the `same`, and the `max_difference` of an output, or of a tensor.

    Raises:
        ValueError: for models that cannot be compared.
    """
    seed, means = take(Seeded, how).seed, take(Means, how)
    if alignment is not None and not tensors:
        raise ValueError("--alignment belongs to --tensors, which compares tensors rather than outputs")
    with opened([a, b], family) as (first, second):
        if tensors:
            maps = None if alignment is None else Alignment.load(alignment)
            if maps is not None:
                for form in (first, Canonical(first, torch.float64)):  # the table says which maps keep the function
                    refuse_wrong_table(form)
            return compare_tensors(first, second, maps, means, tolerance)
        return compare(
            first.folder, second.folder, dtype=means.dtype, seed=seed, device=means.device, tolerance=tolerance
        )


@refuses_unknown()
def distance(a: ModelSource, b: ModelSource, *, family: str | None = None) -> Distances:
    """Return the Euclidean distance over the parameters that two models share: whole, per part and per layer.

    Args:
        a: a model.
        b: another, whose norm relative distances refer to.
        family: the table of both, for a model type that has none.

    Raises:
        ValueError: for models that cannot be compared.
    """
    with opened([a, b], family) as (first, second):
        return distances(first, second)
