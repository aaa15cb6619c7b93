# SPDX-License-Identifier: Apache-2.0
"""Whether the best permutation of a space is the identity, proved from a few columns instead of the whole score.

Rows A_i of the anchor and S_j of the source stretch over all tensors that the space touches; d_i = |A_i - S_i|. If

    |A_i - S_j|^2 >= (d_i^2 + d_j^2) / 2    for all i != j,

then no permutation p is better: sum_i |A_i - S_p(i)|^2 >= sum_i (d_i^2 + d_p(i)^2) / 2 = sum_i d_i^2. (In the words of
linear programming: u_i = (|A_i|^2 - d_i^2 / 2) / 2 and v_j likewise are feasible for the dual, and tight at p(i) = i.)
The squared distance over some of the columns is never more than over all, so it is enough to ask those. Neurons of
models that were tuned from one base differ from each other far more than from themselves, and 128 of thousands of
columns prove it for a small share of the multiplications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from onebasin.symmetry import Signature

from .moments import Pair, _views

FROM = 512  # neurons; below, the whole score takes no time
COLUMNS = 128
FEW = 64  # neurons
BLOCK = 1 << 20  # entries of the score that are looked at together


def stays(signature: Signature, root: str, pairs: Callable[[], Iterable[Pair]], columns: int = COLUMNS) -> bool:
    """Whether it is proved that no permutation of `root` brings the source closer than it is.

    Args:
        signature: Of the source.
        root: A space that is not batched.
        pairs: Gives the tensors that touch it, twice: a few neurons are asked first, since models that are not near
            fail with those already.
        columns: How many columns of the widest tensor the proof compares.
    """
    return all(_stay(signature, root, pairs(), columns, slice(count)) for count in (FEW, None))


def _stay(signature: Signature, root: str, pairs: Iterable[Pair], columns: int, some: slice) -> bool:
    apart: Tensor | None = None
    asked: tuple[Tensor, Tensor] | None = None
    for pair in pairs:
        for diagonal in (False, True):
            for anchor, source, _, weight in _views(signature, root, [pair], diagonal=diagonal):
                a, s = anchor[some], source[some]
                square = weight * _row_squares(a, s)
                apart = square if apart is None else apart + square
                if not diagonal and weight > 0 and (asked is None or asked[0].shape[1] < min(a.shape[1], columns)):
                    every = max(1, a.shape[1] // columns)
                    asked = a[:, ::every][:, :columns] * weight**0.5, s[:, ::every][:, :columns] * weight**0.5
    return apart is not None and asked is not None and _separate(*asked, apart.to(asked[0]))


def _row_squares(a: Tensor, s: Tensor) -> Tensor:
    """|A_i - S_i|^2 of (n, m) matrices, a piece at a time, along which they are stored."""
    if a.stride(0) >= a.stride(1):
        step = max(1, BLOCK // a.shape[1])
        both = zip(torch.split(a, step), torch.split(s, step), strict=True)
        return torch.cat([(x - y).square_().sum(1) for x, y in both])
    step = max(1, BLOCK // a.shape[0])
    total = a.new_zeros(len(a))
    for x, y in zip(torch.split(a, step, 1), torch.split(s, step, 1), strict=True):
        total += (x - y).square_().sum(1)
    return total


def _separate(a: Tensor, s: Tensor, apart: Tensor) -> bool:
    """Whether |A_i - S_j|^2 > (d_i^2 + d_j^2) / 2 beyond rounding, for all i != j; apart: d_i^2, (n,)."""
    n, k = a.shape
    norms, others = a.square().sum(1), s.square().sum(1)
    rounding = 4 * (k + 8) * torch.finfo(a.dtype).eps * float(norms.max() + others.max() + apart.max())
    u, v = (norms - apart / 2) / 2, (others - apart / 2) / 2
    one = torch.ones_like(u)[:, None]
    rows, columns = torch.cat([a, -one, -u[:, None]], 1), torch.cat([s, v[:, None], one], 1)
    step = max(1, BLOCK // n)
    for start in range(0, n, step):
        excess = rows[start : start + step] @ columns.mT  # <A_i, S_j> - u_i - v_j
        excess.diagonal(start).fill_(-torch.inf)
        if not float(excess.max()) < -rounding:
            return False
    return True
