# SPDX-License-Identifier: Apache-2.0
"""Orthogonal maps, for the spaces inside heads and for the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Linear, Monomial
from .group import Group, Latent, monomial_departure, probes, relative, units
from .procrustes import nuclear, polar, sharpened


def random_orthogonal(size: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return Haar-distributed orthogonal matrices (QR of Gaussians with the signs of R fixed), float64."""
    q: Tensor
    q, r = torch.linalg.qr(torch.randn(*batch, size, size, generator=generator, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)


def complement_of_ones(size: int) -> Tensor:
    """Return an orthonormal basis of the vectors that sum to zero, (size, size - 1) float64.

    The Helmert basis: column k is (1, ..., 1, -k, 0, ...) / sqrt(k (k + 1)).
    """
    k = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones(size, size - 1, dtype=torch.float64))
    basis[torch.arange(1, size), torch.arange(size - 1)] = -k
    return basis / torch.sqrt(k * (k + 1))


def turned(free: Tensor) -> Tensor:
    """Return expm(A - A^T), an orthogonal matrix for every A (*batch, n, n); smooth, and 1 at A = 0."""
    found: Tensor = torch.linalg.matrix_exp(free - free.mT)
    return found


def turns(basis: Tensor, batch: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield antisymmetric matrices (*batch, n, n) over an orthonormal basis (n, m) of the vectors that rotate."""
    for unit in units((*batch, basis.shape[1], basis.shape[1])):
        yield basis @ (unit - unit.mT) @ basis.mT


class Turning(Group):
    """A group of rotations of the vectors that a basis spans, (n, m)."""

    def basis(self, size: int) -> Tensor:
        """Return an orthonormal basis of the vectors that rotate: of all."""
        return torch.eye(size, dtype=torch.float64)

    def dimension(self, size: int) -> int:
        turning = self.basis(size).shape[1]
        return turning * (turning - 1) // 2

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        return turns(self.basis(size), batch)

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        turning = self.basis(size).shape[1]
        return {"turn": like.new_zeros(*batch, turning, turning)}


class Orthogonal(Turning):
    """O(n). nearest(M) = polar factor of M."""

    name = "orthogonal"
    moves = frozenset({"rotate"})

    def nearest(self, moments: Moments) -> Linear:
        return Linear(polar(moments.total))

    def gain(self, moments: Moments) -> Tensor:
        return nuclear(moments.total)  # the same number, without the singular vectors

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return Linear(random_orthogonal(size, batch, generator))

    def project(self, element: Element) -> Element:
        return element if isinstance(element, Monomial) else Linear(sharpened(element.matrix.double()))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        if isinstance(element, Monomial):
            return monomial_departure(element, permute=True, signs=True)
        x, g, _, worst = probes(element, generator)
        return max(worst, relative(g.mT @ (g @ x), x))

    def element(self, latent: Latent, settle: bool = False) -> Linear:
        return Linear(turned(latent["turn"]))


class OrthogonalFixingOnes(Turning):
    """Orthogonal maps with O 1 = 1, which commute with a LayerNorm without weight.

    With C an orthonormal basis of the complement of 1, O = C Q C^T + 1 1^T / n and
    <O, M> = <Q, C^T M C> + const, so nearest(M) has Q = polar(C^T M C).
    """

    name = "orthogonal fixing ones"
    moves = frozenset({"ones"})

    def nearest(self, moments: Moments) -> Linear:
        matrix = moments.total
        basis = complement_of_ones(matrix.shape[-1]).to(matrix)
        return Linear(_embed(polar(basis.mT @ matrix @ basis), basis))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return Linear(_embed(random_orthogonal(size - 1, batch, generator), complement_of_ones(size)))

    def basis(self, size: int) -> Tensor:
        return complement_of_ones(size)

    def departure(self, element: Element, generator: torch.Generator) -> float:
        if isinstance(element, Monomial):
            return monomial_departure(element, permute=True)
        x, g, _, worst = probes(element, generator)
        ones = torch.ones(*g.shape[:-1], 1, dtype=g.dtype)
        return max(worst, relative(g.mT @ (g @ x), x), relative(g @ ones, ones))

    def element(self, latent: Latent, settle: bool = False) -> Linear:
        turn = turned(latent["turn"])
        return Linear(_embed(turn, complement_of_ones(turn.shape[-1] + 1).to(turn)))


def _embed(inner: Tensor, basis: Tensor) -> Tensor:
    return basis @ inner @ basis.mT + 1 / basis.shape[0]
