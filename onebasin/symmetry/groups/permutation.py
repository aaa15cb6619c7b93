# SPDX-License-Identifier: Apache-2.0
"""Permutations of neurons, heads, experts; with signs if the nonlinearity is odd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .assignment import assignment
from .base import Moments
from .coupling import Coupling, sinkhorn
from .elements import Acts, Element, Monomial
from .group import Group, Latent, as_moments, monomial_departure

ORDERS = ("fixed", "straight-through", "sinkhorn")  # how a permutation is learned
MARGIN = 0.5  # initial preference of the scores of a permutation for the identity
MIXED = 0.1  # share of every neuron that a coupling initially spreads evenly over all


def random_index(size: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return uniformly random permutations as index vectors, (*batch, size)."""
    return torch.argsort(torch.rand(*batch, size, generator=generator), dim=-1)


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers that are 1 or -1, float64."""
    return (torch.randint(0, 2, shape, generator=generator) * 2.0 - 1).double()


def sign_of(numbers: Tensor) -> Tensor:
    """Return -1 for negative numbers, and 1 for all others."""
    return torch.where(numbers < 0, -1.0, 1.0).to(numbers)


def order_latent(size: int, batch: tuple[int, ...], like: Tensor, order: str) -> dict[str, Tensor]:
    """Return the parameters of a permutation near the identity, (*batch, size, size) each.

    `fixed` has none. `straight-through` has scores Z: the permutation is their assignment, with the gradient of Z
    itself (Bengio et al., 2013; for permutations Ainsworth et al., 2023, section 3.3). `sinkhorn` has Z, whose Sinkhorn
    limit is a doubly stochastic matrix: a relaxation, not a symmetry (Cuturi, 2013).
    """
    eye = torch.eye(size).to(like)
    if order == "straight-through":
        return {"order": (MARGIN * eye).expand(*batch, size, size).clone()}
    if order == "sinkhorn":
        return {"mixture": ((1 - MIXED) * eye + MIXED / size).log().expand(*batch, size, size).clone()}
    return {}


def ordered(group: Group, latent: Latent, settle: bool) -> Monomial | StraightThrough | Coupling:
    """Return the permutation (with signs, if `group` has them) of these scores, or the coupling."""
    if "mixture" in latent:
        return Coupling(sinkhorn(latent["mixture"]).exp())
    score = latent["order"]
    found = group.nearest(as_moments(score.detach()))
    assert isinstance(found, Monomial)
    return found if settle else StraightThrough(found, score)


@dataclass(frozen=True)
class StraightThrough:
    """A permutation P that acts as itself, and whose gradient goes to its scores Z as if P were P + Z - Z.detach().

    order: P, with signs or without. score: (*batch, n, n). scale: (*batch, n), factors that are applied afterwards.
    """

    order: Monomial
    score: Tensor
    scale: Tensor | None = None

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, m) -> (*batch, n, m). dual: for readers of the space."""
        moved: Tensor = _Gather.apply(self.score, x, self.order)  # type: ignore[no-untyped-call]
        return moved if self.scale is None else moved * (1 / self.scale if dual else self.scale).unsqueeze(-1)


class _Gather(torch.autograd.Function):
    """P x, by a gather. So is its gradient in x; only that in the scores, g x^T, takes a product."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, x: Tensor, order: Monomial) -> Tensor:
        ctx.save_for_backward(x)
        ctx.order = order
        return order.act(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        wants_score, wants_x, _ = ctx.needs_input_grad
        back = ctx.order.inverse().act(gradient) if wants_x else None  # its signs are their own inverses
        return gradient @ x.mT if wants_score else None, back, None


class Ordered(Group):
    """A group whose elements permute dimensions, and which is learned through scores."""

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        return order_latent(size, batch, like, order)

    def element(self, latent: Latent, settle: bool = False) -> Acts:
        return ordered(self, latent, settle)


class Permutation(Ordered):
    """S_n. nearest(M) = argmax over permutations of sum_i M[i, p(i)]: linear assignment (paper, Eq. 7)."""

    name = "permutation"
    moves = frozenset({"permute"})

    def nearest(self, moments: Moments) -> Monomial:
        matrix = moments.total
        return Monomial(assignment(matrix if moments.diagonal is None else matrix + moments.diagonal))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return Monomial(random_index(size, batch, generator))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element, permute=True)


class SignedPermutation(Ordered):
    """Permutations with signs (the hyperoctahedral group): neurons of an odd nonlinearity such as tanh.

    For a given pairing the best sign is that of M[i, p(i)], so nearest(M) assigns over |M|.
    """

    name = "signed permutation"
    moves = frozenset({"permute", "sign"})

    def nearest(self, moments: Moments) -> Monomial:
        matrix = moments.total
        size = matrix.abs()
        index = assignment(size if moments.diagonal is None else size + moments.diagonal)
        return Monomial(index, sign_of(torch.take_along_dim(matrix, index.unsqueeze(-1), dim=-1).squeeze(-1)))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        signs = random_signs((*batch, size), generator)
        return Monomial(random_index(size, batch, generator), signs)

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element, permute=True, signs=True)
