# SPDX-License-Identifier: Apache-2.0
"""The trivial group: vocabulary, classes, positions, pixels."""

from __future__ import annotations

import torch

from .base import Moments
from .elements import Element, Monomial
from .group import Group, monomial_departure


class Fixed(Group):
    """Only the identity acts."""

    name = "fixed"
    moves = frozenset[str]()

    def nearest(self, moments: Moments) -> Monomial:
        *batch, n, _ = moments.primal.shape
        return Monomial(torch.arange(n, device=moments.primal.device).expand(*batch, n))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return Monomial(torch.arange(size).expand(*batch, size))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element)
