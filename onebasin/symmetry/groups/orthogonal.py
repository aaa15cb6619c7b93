# SPDX-License-Identifier: Apache-2.0
"""Orthogonal maps: heads' inner bases, and the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Moments
from .elements import Linear
from .procrustes import polar


def random_orthogonal(size: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Haar-distributed orthogonal matrices (QR of Gaussians with the signs of R fixed), float64."""
    q: Tensor
    q, r = torch.linalg.qr(torch.randn(*batch, size, size, generator=generator, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)


def complement_of_ones(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal basis of the vectors that sum to zero, (size, size - 1).

    The Helmert basis: column k is (1, ..., 1, -k, 0, ...) / sqrt(k (k + 1)).
    """
    k = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones(size, size - 1, dtype=torch.float64))
    basis[torch.arange(1, size), torch.arange(size - 1)] = -k
    return (basis / torch.sqrt(k * (k + 1))).to(dtype)


class Orthogonal:
    """O(n). nearest(M) = polar factor of M."""

    name = "orthogonal"
    uses_gram = False

    def nearest(self, moments: Moments) -> Linear:
        return Linear(polar(moments.total))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return Linear(random_orthogonal(size, batch, generator))

    def dimension(self, size: int) -> int:
        return size * (size - 1) // 2


class OrthogonalFixingOnes:
    """Orthogonal maps with O 1 = 1, which commute with a LayerNorm without weight.

    With C an orthonormal basis of the complement of 1, O = C Q C^T + 1 1^T / n and
    <O, M> = <Q, C^T M C> + const, so nearest(M) has Q = polar(C^T M C).
    """

    name = "orthogonal fixing ones"
    uses_gram = False

    def nearest(self, moments: Moments) -> Linear:
        matrix = moments.total
        basis = complement_of_ones(matrix.shape[-1]).to(matrix)
        return Linear(_embed(polar(basis.mT @ matrix @ basis), basis))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return Linear(_embed(random_orthogonal(size - 1, batch, generator), complement_of_ones(size)))

    def dimension(self, size: int) -> int:
        return (size - 1) * (size - 2) // 2


def _embed(inner: Tensor, basis: Tensor) -> Tensor:
    return basis @ inner @ basis.mT + 1 / basis.shape[0]
