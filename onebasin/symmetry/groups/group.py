# SPDX-License-Identifier: Apache-2.0
"""The interface of a group. Everything about a group is in its file; no code outside depends on its class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from .base import Moments
from .elements import Acts, Element, Linear, Monomial

Latent = Mapping[str, Tensor]  # the parameters of one element, by name
MATRICES = ("turn", "shear")  # names of those that are square matrices, one per element of a batch

PROBES = 4  # random vectors to check whether a matrix belongs to a group


class Group(ABC):
    """A group acting on a space of n dimensions, with one hard operation: `nearest`.

    name: for messages. moves: what its elements do, in the terms of `tables.signature.MOVES`. uses_gram: whether
    `nearest` needs the Gram matrices of the moments. exact_gain: whether the gain of every pair of heads has a closed
    form; otherwise it is estimated.
    """

    name: str
    moves: frozenset[str]
    uses_gram: ClassVar[bool] = False
    exact_gain: ClassVar[bool] = True

    @property
    def isometry(self) -> bool:
        """Return whether its elements preserve lengths, so that the source's norms are not needed."""
        return not any(move.endswith("scale") or move == "shear" for move in self.moves)

    @property
    def permutes(self) -> bool:
        """Return whether its elements permute dimensions, which an assignment finds."""
        return "permute" in self.moves

    @property
    def plain(self) -> bool:
        """Return whether its elements only permute dimensions."""
        return self.moves == {"permute"}

    def rigid(self) -> Group:
        """Return the subgroup of isometries, which activations can determine without a scale of their own."""
        return self

    @abstractmethod
    def nearest(self, moments: Moments) -> Element:
        """Return the element that brings the source closest to the anchor."""

    @abstractmethod
    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Element:
        """Return a random element in float64, for tests and scrambling."""

    def gain(self, moments: Moments) -> Tensor:
        """Return half of the difference between the source's norm and the nearest element's `Moments.value`, (*batch,).

        This is the score of pairs in a wreath product; a group may compute it without its elements.
        """
        norm = moments.primal_norm.sum(-1) + moments.dual_norm.sum(-1)
        return (norm - moments.value(self.nearest(moments))) / 2

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield a basis of the Lie algebra of an element for every batch entry: (*batch, size, size), float64."""
        yield from ()

    def dimension(self, size: int) -> int:
        """Return the number of continuous parameters of one element on `size` dimensions."""
        return 0

    def project(self, element: Element) -> Element:
        """Return the element of the group nearest to a product of many single-precision elements, in float64."""
        if isinstance(element, Monomial):
            return element
        assert element.dual is None, f"{self.name}: its elements have no dual of their own"
        return self.nearest(as_moments(element.matrix.double()))

    @abstractmethod
    def departure(self, element: Element, generator: torch.Generator) -> float:
        """Return the largest relative error by which a map deviates from the group on random vectors.

        Raises ValueError ("the map ...") for a form that cannot act at all.
        """

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        """Return the parameters of the identity, by name; none if nothing can be learned.

        like: a tensor with their dtype and device. order: how permutations are learned, see `permutation.ORDERS`.
        """
        return {}

    def element(self, latent: Latent, settle: bool = False) -> Acts:
        """Return the element with these parameters, differentiably.

        settle: return an element of the group, if it is learned through something else (an assignment).
        """
        raise ValueError(f"{self.name}: it has nothing to learn")


class Stretched(Group):
    """A group whose elements include a factor for every dimension."""

    def dimension(self, size: int) -> int:
        return size

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        return map(torch.diag_embed, units((*batch, size)))

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        return {"stretch": like.new_zeros(*batch, size), **super().parametrize(size, batch, like, order)}


def as_moments(matrix: Tensor) -> Moments:
    """Return moments whose nearest element is the one nearest to a matrix, (*batch, n, n)."""
    nothing = torch.zeros(matrix.shape[:-1], dtype=matrix.dtype, device=matrix.device)
    return Moments(matrix, torch.zeros_like(matrix), nothing, nothing)


def inverse_transposed(element: Linear) -> Tensor:
    """Return the dual of a map in float64: one step of Newton's iteration, H (2 - G^T H), from its own dual."""
    g, h = element.matrix.double(), element.of(dual=True).double()
    return 2 * h - h @ (g.mT @ h)


def units(shape: torch.Size | tuple[int, ...]) -> Iterator[Tensor]:
    """Yield every tensor of this shape with one 1 and zeros elsewhere, float64."""
    for i in range(torch.Size(shape).numel()):
        unit = torch.zeros(shape, dtype=torch.float64)
        unit.view(-1)[i] = 1
        yield unit


# --- whether a map belongs to a group ------------------------------------------------------------------------------


def monomial_departure(
    element: Element, *, permute: bool = False, signs: bool | Tensor = False, scale: bool = False
) -> float:
    """Return the largest deviation of the factors of a permutation from those that are allowed.

    signs: whether factors may be negative; or the two dimensions of every pair, (2, n / 2), whose signs are equal.
    Raises ValueError ("the map ...") for a matrix, and for deviations that are not due to rounding.
    """
    if isinstance(element, Linear):
        raise ValueError("a matrix may not act there")
    index = element.index.cpu()
    stays = torch.arange(index.shape[-1]).expand_as(index)
    if not torch.equal(index.sort(-1).values, stays):
        raise ValueError("the map is not a permutation")
    if not permute and not torch.equal(index, stays):
        raise ValueError("nothing may change places there")
    if element.scale is None:
        return 0.0
    factor = element.scale.cpu().double()
    if not bool((torch.isfinite(factor) & (factor != 0)).all()):
        raise ValueError("the map has a factor that is zero or not finite")
    if signs is False and bool((factor < 0).any()):
        raise ValueError("the map has a negative factor")
    if isinstance(signs, Tensor) and not torch.equal(factor[..., signs[0]], factor[..., signs[1]]):
        raise ValueError("the map flips one dimension of a pair alone")
    return 0.0 if scale else float((factor.abs() - 1).abs().max())


def probes(element: Linear, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return random vectors x (*batch, n, k), the map and its dual in float64, and the error of the dual as an inverse.

    Raises ValueError ("the map is not finite").
    """
    if not all(bool(torch.isfinite(matrix).all()) for matrix in element.parts.values()):
        raise ValueError("the map is not finite")
    n = element.matrix.shape[-1]
    x = torch.randn(n, PROBES, generator=generator, dtype=torch.float64).expand(*element.matrix.shape[:-2], n, PROBES)
    g, h = (element.of(dual).cpu().double() for dual in (False, True))
    return x, g, h, relative(h.mT @ (g @ x), x)  # h is the inverse transpose, or g itself if it is orthogonal


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of the columns of `found`."""
    return float(((found - expected).norm(dim=-2) / expected.norm(dim=-2)).max())
