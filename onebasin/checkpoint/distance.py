# SPDX-License-Identifier: Apache-2.0
"""The Euclidean distance between two models over what they share: whole, per part, per layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt

import torch

from onebasin.engine import in_order
from onebasin.symmetry import Alignment, Signature

from .pairing import read_pair, shared_roles
from .reader import Checkpoint

_PARTS = ("attention", "ffn", "norm", "embedding", "head", "other")


@dataclass(frozen=True)
class Distances:
    """distance: |a - b|. relative: |a - b| / |b|. parts and layers: |a - b| over their tensors alone."""

    distance: float
    relative: float
    parts: dict[str, float]
    layers: dict[str, float]


def distances(
    a: Checkpoint,
    b: Checkpoint,
    align: Alignment | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    workers: int | None = 1,
) -> Distances:
    """The distance between `a`, rewritten by `align`, and `b`, over their shared tensors.

    Two tensors are in memory at a time for every worker, read in `dtype`; squares are summed in float64.
    Raises CheckpointError where the models cannot be paired (`shared_roles`) or hold NaN or infinity.
    """
    return before_and_after(a, b, align, dtype=dtype, device=device, workers=workers)[1]


@torch.no_grad()
def before_and_after(
    a: Checkpoint,
    b: Checkpoint,
    align: Alignment | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    workers: int | None = 1,
) -> tuple[Distances, Distances]:
    """The distances of `a` as it is and as `align` rewrites it, from one read."""
    signature = a.signature
    roles = shared_roles(a, b).roles

    def squares(role: str) -> tuple[float, float, float]:
        x, y = read_pair(a, b, role, dtype, device)
        moved = x if align is None else align.apply(signature, role, x)
        before = _square(x.sub(y))
        return before, before if moved is x else _square(moved.sub(y)), _square(y)

    found = list(in_order(squares, roles, workers))
    norm = sum(size for _, _, size in found)
    before, after = (
        _summed(signature, dict(zip(roles, (one[which] for one in found), strict=True)), norm) for which in (0, 1)
    )
    return before, after


def _summed(signature: Signature, squares: Mapping[str, float], norm: float) -> Distances:
    parts: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
    layers: defaultdict[int, float] = defaultdict(float)
    for role, square in squares.items():
        entry = signature.tensors[role]
        parts[signature.part(entry)] += square
        if entry.layer is not None:
            layers[entry.layer] += square
    distance = sqrt(sum(parts.values()))
    return Distances(
        distance,
        distance / sqrt(norm) if norm else (inf if distance else 0.0),
        {part: sqrt(square) for part, square in parts.items()},
        {str(layer): sqrt(layers[layer]) for layer in sorted(layers)},
    )


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
