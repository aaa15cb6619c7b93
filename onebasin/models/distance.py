# SPDX-License-Identifier: Apache-2.0
"""The Euclidean distance between two models over the tensors that they share: in total, per part, per layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.engine import Means, in_order
from onebasin.symmetry import Alignment, Signature

from .model import Model
from .pairing import read_pair, shared_roles

_PARTS = ("attention", "ffn", "norm", "embedding", "head", "other")
PIECE = 1 << 16
LEAST = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Distances:
    """distance: |a - b|. relative: |a - b| / |b|. parts, layers: |a - b| over their tensors alone. weighted: the sum of
    |a - b|^2 over all tensors, each times its weight; weighted_norm: the same sum of |b|^2."""

    distance: float
    relative: float
    parts: dict[str, float]
    layers: dict[str, float]
    weighted: float
    weighted_norm: float


def distances(
    a: Model,
    b: Model,
    align: Alignment | None = None,
    means: Means | None = None,
) -> Distances:
    """Return the distance between `a`, rewritten by `align`, and `b`, over their shared tensors.

    Two tensors are in memory at a time for every worker; squares are summed in float64.

    Args:
        a: A model.
        b: The model to compare it with.
        align: Rewrites `a` (default: as it is).
        means: The type and device of the arithmetic, and how many tensors are compared at a time (default: one).

    Raises:
        ModelError: The models cannot be paired (`shared_roles`), or hold NaN or infinity.
    """
    return before_and_after(a, b, align, means)[1]


@torch.no_grad()
def before_and_after(
    a: Model,
    b: Model,
    align: Alignment | None,
    means: Means | None = None,
    weigh: Callable[[str, Tensor, Tensor], float] | None = None,
) -> tuple[Distances, Distances]:
    """Return the distances of `a` as it is and as `align` rewrites it, from one read.

    means: as in `distances`. weigh: role, its tensors of b and of a -> the weight of its squared distance (default: 1).
    """
    means, signature = means or Means(workers=1), a.signature
    roles = shared_roles(a, b).roles

    def squares(role: str) -> tuple[float, float, float, float]:
        x, y = read_pair(a, b, role, means.dtype, means.device)
        moved = x if align is None else align.apply(signature, role, x)
        before = squared_distance(x, y)
        after, weight = before if moved is x else squared_distance(moved, y), weigh(role, y, x) if weigh else 1.0
        return before, after, squared_distance(y), weight

    found = dict(zip(roles, in_order(squares, roles, means.workers), strict=True))
    before, after = (
        _summed(signature, {role: (one[which], *one[2:]) for role, one in found.items()}) for which in (0, 1)
    )
    return before, after


def _summed(signature: Signature, found: Mapping[str, tuple[float, float, float]]) -> Distances:
    """Add up squares. found: role -> |a - b|^2, |b|^2, weight."""
    squares, norm = {role: one[0] for role, one in found.items()}, sum(one[1] for one in found.values())
    parts: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
    layers: defaultdict[int, float] = defaultdict(float)
    for role, square in squares.items():
        entry = signature.tensors[role]
        parts[signature.part(entry)] += square
        if entry.layer is not None:
            layers[entry.layer] += square
    distance = math.sqrt(sum(parts.values()))
    return Distances(
        distance,
        distance / math.sqrt(norm) if norm else (math.inf if distance else 0.0),
        {part: math.sqrt(square) for part, square in parts.items()},
        {str(layer): math.sqrt(layers[layer]) for layer in sorted(layers)},
        sum(square * weight for square, _, weight in found.values()),
        sum(size * weight for _, size, weight in found.values()),
    )


def squared_distance(x: Tensor, y: Tensor | None = None) -> float:
    """Return |x - y|^2, or |x|^2: the sum, in float64, over pieces that fit into a core's cache."""
    total = math.inf
    if x.device.type == "cpu":
        pieces = torch.split(x.reshape(-1), PIECE)
        others = pieces if y is None else torch.split(y.reshape(-1), PIECE)
        apart = (one if y is None else one - other for one, other in zip(pieces, others, strict=True))
        total = math.fsum(float(piece @ piece) for piece in apart)
    if not LEAST < total < math.inf:  # on other devices, and for squares outside the normal range of float32
        total = float(torch.linalg.vector_norm(x if y is None else x - y, dtype=torch.float64)) ** 2
    return total
