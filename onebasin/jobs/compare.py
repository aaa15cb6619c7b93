# SPDX-License-Identifier: Apache-2.0
"""onebasin verify and onebasin distance: what two folders have in common, as functions and as points."""

from __future__ import annotations

from typing import Any

from onebasin.checkpoint import Distances, Verification, compare, distances

from .folders import opened
from .options import Model, refuse_device


def verify(a: Model, b: Model, *, family: str | None = None, **how: Any) -> Verification:
    """Do two models compute the same function? Random valid inputs; see `onebasin.checkpoint.compare`."""
    refuse_device(how.get("device", "cpu"))
    with opened([a, b], family) as (first, second):
        return compare(first.folder, second.folder, **how)


def distance(a: Model, b: Model, *, family: str | None = None) -> Distances:
    """Euclidean distance over the parameters that two models share: whole, per part, per layer."""
    with opened([a, b], family) as (first, second):
        return distances(first, second)
