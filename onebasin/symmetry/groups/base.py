# SPDX-License-Identifier: Apache-2.0
"""The statistics that matching passes to a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .elements import Element, Monomial


@dataclass(frozen=True)
class Moments:
    """Everything that determines the best element of a space while all others are fixed.

    Over the tensors that write the space (primal) and those that read it (dual), with the space's axis first and
    everything else flattened, anchor A and source S:
    primal, dual              sum of A S^T, (*batch, n, n)
    primal_norm, dual_norm    squared norms of the rows of S, (*batch, n)
    primal_gram, dual_gram    sum of S S^T, (*batch, n, n); None unless the group `uses_gram`
    diagonal                  sum of a s^T over the weights a, s of norms, (*batch, n, n): diagonal matrices, on which
                              only permutations act, and no signs; None if there are none
    one_sided                 whether `dual` is zero: no tensor reads the space, or the element is an isometry, which
                              acts on readers as on writers, so that all of them are in `primal`
    so_far                    the map that has acted on S already, (*batch, n, n), for groups that bound its product
                              with the element; None for the identity
    The squared distance of g is
        |A|^2 + |g S|^2 + |g^-T S|^2 - 2 <g, primal> - 2 <g^-T, dual>.
    """

    primal: Tensor
    dual: Tensor
    primal_norm: Tensor
    dual_norm: Tensor
    primal_gram: Tensor | None = None
    dual_gram: Tensor | None = None
    diagonal: Tensor | None = None
    one_sided: bool = False
    so_far: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Return the matrix M of `argmax <g, M>` for g^-T = g (permutations, signs, orthogonal maps)."""
        return self.primal if self.one_sided else self.primal + self.dual

    def value(self, element: Element) -> Tensor:
        """Return the squared distance of `element` less its constant |A|^2, (*batch,).

        Without Gram matrices, |g S|^2 is computed from the row norms, which is exact if the matrix of the element has
        orthogonal columns: in all groups but `Invertible`.
        """
        if isinstance(element, Monomial):
            return self._value_of_monomial(element) + self._of_norms(element.index)
        total = self.primal.new_zeros(self.primal.shape[:-2])
        for dual, cross, norm, gram in (
            (False, self.primal, self.primal_norm, self.primal_gram),
            (True, self.dual, self.dual_norm, self.dual_gram),
        ):
            g = element.of(dual).to(self.primal if gram is None else gram)
            grown = (g**2).sum(-2).mul(norm).sum(-1) if gram is None else (g @ gram * g).sum((-2, -1))
            total = total + grown - 2 * (g * cross).sum((-2, -1))
        here = torch.arange(self.primal.shape[-1], device=self.primal.device)
        return total + self._of_norms(here)

    def _of_norms(self, index: Tensor) -> Tensor | float:
        if self.diagonal is None:
            return 0.0
        index = index.expand(self.diagonal.shape[:-1])
        return -2 * torch.take_along_dim(self.diagonal, index.unsqueeze(-1), dim=-1).sum((-2, -1))

    def _value_of_monomial(self, element: Monomial) -> Tensor:
        """Return `value` from the n entries that a permutation picks, without an n x n matrix."""
        index = element.index.expand(self.primal.shape[:-1])
        total = self.primal.new_zeros(self.primal.shape[:-2])
        for dual, cross, norm in (
            (False, self.primal, self.primal_norm),
            (True, self.dual, self.dual_norm),
        ):
            picked = torch.take_along_dim(cross, index.unsqueeze(-1), dim=-1).squeeze(-1)
            norm = torch.take_along_dim(norm, index, dim=-1)
            if element.scale is not None:
                scale = 1 / element.scale if dual else element.scale
                picked, norm = scale * picked, scale**2 * norm
            total = total + (norm - 2 * picked).sum(-1)
        return total

    def stay(self) -> Tensor:
        """Return `value` of the identity, (*batch,)."""
        trace = sum(torch.diagonal(m, dim1=-2, dim2=-1).sum(-1) for m in (self.primal, self.dual))
        here = torch.arange(self.primal.shape[-1], device=self.primal.device)
        return self.primal_norm.sum(-1) + self.dual_norm.sum(-1) - 2 * trace + self._of_norms(here)

    def map(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """Apply `change` to every statistic: a new dtype, device, or shape of the batch."""
        primal_gram, dual_gram, diagonal, so_far = (
            None if each is None else change(each)
            for each in (self.primal_gram, self.dual_gram, self.diagonal, self.so_far)
        )
        return Moments(change(self.primal), change(self.dual), change(self.primal_norm), change(self.dual_norm),
                       primal_gram, dual_gram, diagonal, self.one_sided, so_far)  # fmt: skip

    def take(self, index: Tensor | tuple[Tensor, ...] | slice) -> Moments:
        """Return the moments of some batch entries."""
        return self.map(lambda statistic: statistic[index])

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.primal + other.primal, self.dual + other.dual,
                       self.primal_norm + other.primal_norm, self.dual_norm + other.dual_norm,
                       _add(self.primal_gram, other.primal_gram),
                       _add(self.dual_gram, other.dual_gram),
                       _add(self.diagonal, other.diagonal),
                       self.one_sided and other.one_sided,
                       other.so_far if self.so_far is None else self.so_far)  # fmt: skip


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b
