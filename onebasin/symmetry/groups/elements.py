# SPDX-License-Identifier: Apache-2.0
"""Elements of the groups, in one of two forms: a gather with scales, or a matrix.

Both act on the vectors of a space by `x -> g x`. A tensor that *reads* from the space takes the dual `g^-T`, so that
(W g^-1)(g x) = W x. Leading dimensions are a batch, such as one map for every head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .gemm import gemm


@dataclass(frozen=True)
class Monomial:
    """Permutation with an optional scale: (g x)[i] = scale[i] * x[index[i]].

    index: (*batch, n) int64. scale: (*batch, n), non-zero, or None for all ones.
    """

    index: Tensor
    scale: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.index.dim() - 1

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, m) -> (*batch, n, m)."""
        index = self.index.to(x.device)
        if index.dim() == 1:
            out = x.index_select(-2, index)
        elif index.shape == x.shape[:-1]:  # whole rows are gathered ten times as fast as single numbers
            first = torch.arange(0, index.numel(), index.shape[-1], device=x.device).reshape(*index.shape[:-1], 1)
            out = x.flatten(0, -2).index_select(0, (first + index).flatten()).view(x.shape)
        else:
            out = x.take_along_dim(index.unsqueeze(-1), dim=-2)
        if self.scale is None:
            return out
        scale = self.scale.to(x)
        return out * (1 / scale if dual else scale).unsqueeze(-1)

    def after(self, first: Monomial) -> Monomial:
        """Return the product `self * first`: apply `first`, then `self`."""
        index = torch.take_along_dim(first.index, self.index, dim=-1)
        scale = self.scale
        if first.scale is not None:
            moved = torch.take_along_dim(first.scale, self.index, dim=-1)
            scale = moved if scale is None else scale * moved
        return Monomial(index, scale)

    def inverse(self) -> Monomial:
        index = torch.argsort(self.index, dim=-1)
        scale = None if self.scale is None else 1 / torch.take_along_dim(self.scale, index, dim=-1)
        return Monomial(index, scale)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {"index": self.index} if self.scale is None else {"index": self.index, "scale": self.scale}

    def map(self, change: Callable[[Tensor], Tensor]) -> Monomial:
        """Apply `change` to every tensor: another order of the batch, say."""
        return Monomial(**{name: change(part) for name, part in self.parts.items()})

    def is_identity(self) -> bool:
        n = self.index.shape[-1]
        same = bool((self.index == torch.arange(n, device=self.index.device)).all())
        return same and (self.scale is None or bool((self.scale == 1).all()))

    def dense(self, dtype: torch.dtype = torch.float64) -> Linear:
        """Return the same map as a matrix (only for small spaces, and for products with `Linear`)."""
        n = self.index.shape[-1]
        eye = torch.eye(n, dtype=dtype, device=self.index.device).expand(*self.index.shape, n)
        return Linear(self.act(eye), None if self.scale is None else self.act(eye, dual=True))


@dataclass(frozen=True)
class Linear:
    """Invertible matrix. `dual` is its inverse transpose, or None if the matrix is orthogonal.

    matrix, dual: (*batch, n, n), floating point.
    """

    matrix: Tensor
    dual: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.matrix.dim() - 2

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, m) -> (*batch, n, m)."""
        return gemm(self.of(dual).to(x), x.mT)

    def of(self, dual: bool) -> Tensor:
        """Return the matrix that acts on writers of the space, or on its readers (dual)."""
        return self.dual if dual and self.dual is not None else self.matrix

    def after(self, first: Linear) -> Linear:
        """Return the product `self * first`: apply `first`, then `self`."""
        first_matrix = first.matrix.to(self.matrix)
        if self.dual is None and first.dual is None:
            return Linear(self.matrix @ first_matrix)
        mine = self.of(dual=True)
        return Linear(self.matrix @ first_matrix, mine @ first.of(dual=True).to(mine))

    def inverse(self) -> Linear:
        if self.dual is None:
            return Linear(self.matrix.mT)
        return Linear(self.dual.mT, self.matrix.mT)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {"matrix": self.matrix} if self.dual is None else {"matrix": self.matrix, "dual": self.dual}

    def map(self, change: Callable[[Tensor], Tensor]) -> Linear:
        """Apply `change` to every tensor: another order of the batch, say."""
        return Linear(**{name: change(part) for name, part in self.parts.items()})

    def is_identity(self) -> bool:
        n = self.matrix.shape[-1]
        return bool((self.matrix == torch.eye(n).to(self.matrix)).all())


Element = Monomial | Linear


class Acts(Protocol):
    """A map of the vectors of a space: an element of a group, or a coupling."""

    def act(self, x: Tensor, dual: bool = False) -> Tensor: ...


def product(second: Element, first: Element) -> Element:
    """Return `second * first`: apply `first`, then `second`. A product of both forms is a matrix."""
    if isinstance(second, Monomial) and isinstance(first, Monomial):
        return second.after(first)
    if isinstance(second, Monomial):
        assert isinstance(first, Linear)
        second = second.dense(first.matrix.dtype)
    if isinstance(first, Monomial):
        first = first.dense(second.matrix.dtype)
    return second.after(first)


def act_on(x: Tensor, element: Acts, batch: tuple[int, ...], dim: int, dual: bool) -> Tensor:
    """Let `element` act on dimension `dim` of x, its batch running over the dimensions `batch`.

    x: any shape -> the same shape, except for couplings of spaces of different sizes. Nothing acts on other dimensions.
    """
    if isinstance(element, Monomial) and x.shape[dim] == 1 and element.index.dim() == len(batch) + 1:
        return _stretched(x, element, batch, dual)
    if isinstance(element, Monomial) and not batch and element.index.dim() == 1:
        # Gather along this dimension: transposing first takes ten times as long.
        out = x.index_select(dim, element.index.to(x.device))
        if element.scale is None:
            return out
        scale = element.scale.to(x)
        return out * (1 / scale if dual else scale).view(-1, *[1] * (x.dim() - dim - 1))
    rest = tuple(d for d in range(x.dim()) if d != dim and d not in batch)
    if isinstance(element, Linear) and dim == x.dim() - 1:
        # The rows of x are the vectors: multiplication from the right needs no transpose.
        order = (*batch, *rest, dim)
        moved = x.permute(order)
        rows = moved.reshape(*moved.shape[: len(batch)], -1, moved.shape[-1])
        out = gemm(rows, element.of(dual).to(x)).reshape(moved.shape)
    else:
        order = (*batch, dim, *rest)
        moved = x.permute(order)
        out = element.act(moved.reshape(*moved.shape[: len(batch) + 1], -1), dual)
        out = out.reshape(*out.shape[:-1], *moved.shape[len(batch) + 1 :])
    back = [0] * x.dim()
    for position, original in enumerate(order):
        back[original] = position
    return out.permute(back)


def _stretched(x: Tensor, element: Monomial, batch: tuple[int, ...], dual: bool) -> Tensor:
    """Apply factors of spaces of one dimension, (*batch, 1), in place of a gather."""
    if element.scale is None:
        return x
    scale = element.scale.to(x).squeeze(-1)
    scale = scale.permute([batch.index(d) for d in sorted(batch)])
    scale = scale.reshape([x.shape[d] if d in batch else 1 for d in range(x.dim())])
    return x * (1 / scale if dual else scale)
