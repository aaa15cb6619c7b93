# SPDX-License-Identifier: Apache-2.0
"""Kinship of models by their weights: the same, of one base, or trained apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from onebasin.engine import in_order

from .model import Model
from .pairing import common_roles, of_one_width, read_pair

RELATED = 0.5  # models with at least this cosine share an origin; unrelated models are nearly orthogonal
SAME = 1e-6  # squared distance between equal layers, relative to their squared norms

SAME_FUNCTION, ONE_BASE, APART = "the same function", "one base", "trained apart"


@dataclass(frozen=True)
class Kinship:
    """cosine: of the matrices of a layer, the least over all pairs and layers. kind: one of the constants above."""

    cosine: float
    kind: str

    @property
    def sentence(self) -> str:
        """Return both as text."""
        return f"{self.kind} (cosine of their layers {self.cosine:.3f} or more)"


def kinship(models: Sequence[Model], *, workers: int | None = None) -> Kinship:
    """Compare the weights of models layer by layer, without matching them.

    Only matrices inside layers are compared: norms and biases agree between unrelated models, and embeddings are often
    shared by models whose layers are not.

    models: two or more; models of different shapes count as trained apart.
    """
    if not of_one_width(models):
        return Kinship(0.0, APART)
    signatures = [model.signature for model in models]
    matrices = [
        role
        for role in common_roles(models).roles
        if len(signatures[0].tensors[role].shape) > 1
        and len({signature.tensors[role].shape for signature in signatures}) == 1
    ]
    inside = [role for role in matrices if signatures[0].tensors[role].layer is not None] or matrices
    least, equal = 1.0, True
    for a, b in combinations(models, 2):

        def products(role: str, a: Model = a, b: Model = b) -> tuple[float, float, float]:
            x, y = (tensor.flatten() for tensor in read_pair(a, b, role, torch.float32))
            return float(x @ y), float(x @ x), float(y @ y)

        sums: dict[int | None, list[float]] = {}
        for role, found in zip(inside, in_order(products, inside, workers), strict=True):
            own = sums.setdefault(signatures[0].tensors[role].layer, [0.0, 0.0, 0.0])
            own[:] = [old + new for old, new in zip(own, found, strict=True)]
        for dot, first, second in sums.values():
            least = min(least, dot / (first * second) ** 0.5 if first * second else float(first == second))
            equal &= first + second - 2 * dot <= SAME * (first + second)
    return Kinship(least, SAME_FUNCTION if equal and inside else ONE_BASE if inside and least >= RELATED else APART)
