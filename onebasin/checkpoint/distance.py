# SPDX-License-Identifier: Apache-2.0
"""The Euclidean distance between two models over what they share: whole, per part, per layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf, sqrt

import torch

from onebasin.symmetry import Alignment

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


@torch.no_grad()
def distances(
    a: Checkpoint,
    b: Checkpoint,
    align: Alignment | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Distances:
    """The distance between `a`, rewritten by `align`, and `b`, over their shared tensors.

    Two tensors are in memory at a time, read in `dtype`; squares are summed in float64.
    Raises CheckpointError where the models cannot be paired (`shared_roles`) or hold NaN or infinity.
    """
    signature = a.signature
    parts: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
    layers: defaultdict[int, float] = defaultdict(float)
    norm = 0.0
    for role in shared_roles(a, b).roles:
        entry = signature.tensors[role]
        x, y = read_pair(a, b, role, dtype, device)
        if align is not None:
            x = align.apply(signature, role, x)
        square = _square(x.sub(y))
        norm += _square(y)
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
