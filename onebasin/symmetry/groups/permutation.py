# SPDX-License-Identifier: Apache-2.0
"""Permutations of neurons, heads, experts; with signs where the nonlinearity is odd."""

from __future__ import annotations

import torch
from torch import Tensor

from .assignment import assignment
from .base import Moments
from .elements import Monomial


def random_index(size: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniformly random index vectors, (*batch, size)."""
    return torch.argsort(torch.rand(*batch, size, generator=generator), dim=-1)


class Permutation:
    """S_n. nearest(M) = argmax over permutations of sum_i M[i, p(i)]: linear assignment (paper, Eq. 7)."""

    name = "permutation"
    uses_gram = False

    def nearest(self, moments: Moments) -> Monomial:
        matrix = moments.total
        return Monomial(assignment(matrix if moments.diagonal is None else matrix + moments.diagonal))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return Monomial(random_index(size, batch, generator))

    def dimension(self, size: int) -> int:
        return 0


class SignedPermutation:
    """Permutations with signs (the hyperoctahedral group): neurons of an odd nonlinearity such as tanh.

    For a given pairing the best sign is that of M[i, p(i)], so nearest(M) assigns over |M|.
    """

    name = "signed permutation"
    uses_gram = False

    def nearest(self, moments: Moments) -> Monomial:
        matrix = moments.total
        size = matrix.abs()
        index = assignment(size if moments.diagonal is None else size + moments.diagonal)
        values = torch.take_along_dim(matrix, index.unsqueeze(-1), dim=-1).squeeze(-1)
        return Monomial(index, torch.where(values < 0, -1.0, 1.0).to(matrix))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        signs = torch.randint(0, 2, (*batch, size), generator=generator) * 2.0 - 1
        return Monomial(random_index(size, batch, generator), signs.double())

    def dimension(self, size: int) -> int:
        return 0
