# SPDX-License-Identifier: Apache-2.0
"""The best permutation of a space, found and proved from a few columns instead of all scores.

Rows A_i of the anchor and S_j of the source extend over all tensors that the space touches. Let v_i be the least
squared distance of A_i and S_p(i), over the maps that act inside them (a factor for each gated neuron, say). If

    |A_i - S_p(j)|^2 >= (v_i + v_j) / 2    for all i != j,

over columns on which no map acts, then p is the best permutation: any other q pairs i with p(r(i)) for some order r,
and sum_i |A_i - S_p(r(i))|^2 >= sum_i (v_i + v_r(i)) / 2 = sum_i v_i. (In terms of linear programming:
u_i = (|A_i|^2 - v_i / 2) / 2 and likewise for the columns are feasible for the dual, and tight at p.) The squared
distance over some of the columns is at most that over all, so some columns suffice. If models were tuned from one base,
or are reordered copies of one another, a neuron is far nearer to its partner than to all others: 128 of thousands of
columns identify the partner of each, and prove it with a small share of the multiplications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetry import Group, Moments, Signature
from onebasin.symmetry.groups.elements import Element, Monomial

from .components import Block
from .moments import Pair, View, _unmoved, _views

FROM = 512  # neurons; with fewer, computing all scores takes no time
COLUMNS = 128
FEW = 64  # neurons
APART = 2.0  # a try is worthwhile if, for most neurons, the second nearest is this much further than the nearest
BLOCK = 1 << 20  # scores that are computed at a time


def provable(signature: Signature, block: Block, groups: Mapping[str, Group]) -> bool:
    """Return whether a block is one permutation of many single dimensions such as neurons, perhaps with factors."""
    inner = all(signature.sizes[one] == 1 and len(signature.spaces[one].batch) == 1 for one in block.inner)
    many = signature.sizes[block.root] >= FROM
    return many and groups[block.root].plain and inner and not signature.spaces[block.root].batch


def proved(
    signature: Signature,
    root: str,
    inner: Mapping[str, Group],
    pairs: Callable[[], Iterable[Pair]],
    columns: int = COLUMNS,
) -> tuple[dict[str, Element], float] | None:
    """Return the best permutation of `root`, the best maps inside, and by how much they lower the squared distance.

    None if a few columns do not prove which permutation that is.

    Args:
        signature: Of the source.
        root: A space that is not batched, whose group only permutes.
        inner: The groups inside it: of spaces of one dimension, batched over `root`.
        pairs: Returns the tensors that touch it. It is called twice, since models that are not near fail after a few
            neurons of one tensor.
        columns: The number of columns of the widest tensor to compare.
    """
    asked = _asked(_unmoved(signature, root, inner, pairs()), columns)
    if asked is None or not _worth_it(*asked):
        return None
    anchor, source = asked
    order = _nearest(anchor, source)
    if not bool((order.bincount(minlength=len(order)) == 1).all()):
        return None
    after = before = anchor.new_zeros(len(order))
    views: dict[str, list[View]] = {one: [] for one in inner}
    for pair in pairs():
        for a, s, _, weight in _unmoved(signature, root, inner, [pair]):
            after = after + weight * _row_squares(a, s, order)
            before = before + weight * _row_squares(a, s)
        for one in inner:
            views[one] += _views(signature, one, [pair])
    elements: dict[str, Element] = {root: Monomial(order)}
    for one, group in inner.items():
        elements[one], moved, still = _inside(group, views[one], order)
        after, before = after + moved, before + still
    if not _separate(anchor, source[order], after):
        return None
    return elements, float((before.double() - after.double()).sum())


def _asked(views: Iterable[View], columns: int) -> tuple[Tensor, Tensor] | None:
    """Return some columns of the first view that is wide enough, or else the widest: (n, k) of anchor and source."""
    found: tuple[Tensor, Tensor] | None = None
    for a, s, _, weight in views:
        if weight > 0 and (found is None or found[0].shape[1] < min(a.shape[1], columns)):
            every = max(1, a.shape[1] // columns)
            found = a[:, ::every][:, :columns] * weight**0.5, s[:, ::every][:, :columns] * weight**0.5
    return found


def _worth_it(anchor: Tensor, source: Tensor) -> bool:
    """Whether most of a few neurons have a partner that is far nearer than all others."""
    if len(source) < 2:
        return True
    squares = torch.cdist(anchor[:FEW], source).square()
    nearest, second = squares.topk(2, largest=False).values.unbind(1)
    return bool((second > APART * nearest).double().mean() > 0.5)


def _nearest(anchor: Tensor, source: Tensor) -> Tensor:
    """Return the row of the source that is nearest to each row of the anchor, (n,)."""
    half = source.square().sum(1) / 2
    return torch.cat([(rows @ source.mT - half).argmax(1) for rows in torch.split(anchor, _rows(len(source)))])


def _inside(group: Group, views: Sequence[View], order: Tensor) -> tuple[Element, Tensor, Tensor]:
    """Return the best element inside each pair of neurons, and the squared distances with it and without maps, (n,)."""
    n = len(order)
    sums = {dual: views[0][0].new_zeros(2, n) for dual in (False, True)}
    for a, s, leaf, weight in views:
        products, norms = sums[leaf.dual]
        for some, x, y in _pieces(a[:, 0], s[:, 0], order):
            products[some] += weight * (x * y).sum(1)
            norms[some] += weight * y.square().sum(1)
    (primal, p), (dual, d) = sums[False], sums[True]
    element = group.nearest(Moments(primal[:, None, None], dual[:, None, None], p[:, None], d[:, None]))
    after = before = p.new_zeros(n)
    for a, s, leaf, weight in views:
        factor = element.act(p.new_ones(n, 1, 1), leaf.dual)[:, 0]
        after = after + weight * _row_squares(a[:, 0], s[:, 0], order, factor)
        before = before + weight * _row_squares(a[:, 0], s[:, 0])
    return element, after, before


def _row_squares(a: Tensor, s: Tensor, order: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """Return |A_i - f_i S_order(i)|^2 of (n, m) matrices. factor: (n, 1)."""
    total = a.new_zeros(len(a))
    for some, x, y in _pieces(a, s, order):
        total[some] += (x - (y if factor is None else y * factor[some])).square_().sum(1)
    return total


def _pieces(a: Tensor, s: Tensor, order: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (n, m) matrices piece by piece in the order of storage, the source's rows in `order`: (rows, A, S)."""
    if a.stride(0) >= a.stride(1):
        for start in range(0, len(a), step := _rows(a.shape[1])):
            some = slice(start, start + step)
            yield some, a[some], s[some if order is None else order[some]]
    else:
        for x, y in zip(*(torch.split(each, _rows(len(a)), 1) for each in (a, s)), strict=True):
            yield slice(None), x, y if order is None else y.mT.index_select(1, order).mT


def _rows(length: int) -> int:
    """Return the number of rows of this length to process at a time."""
    return max(1, BLOCK // length)


def _separate(a: Tensor, s: Tensor, apart: Tensor) -> bool:
    """Whether |A_i - S_j|^2 > (d_i^2 + d_j^2) / 2 beyond rounding, for all i != j; apart: d_i^2, (n,)."""
    n, k = a.shape
    norms, others = a.square().sum(1), s.square().sum(1)
    rounding = 4 * (k + 8) * torch.finfo(a.dtype).eps * float(norms.max() + others.max() + apart.max())
    u, v = (norms - apart / 2) / 2, (others - apart / 2) / 2
    one = torch.ones_like(u)[:, None]
    rows, columns = torch.cat([a, -one, -u[:, None]], 1), torch.cat([s, v[:, None], one], 1)
    step = _rows(n)
    for start in range(0, n, step):
        excess = rows[start : start + step] @ columns.mT  # <A_i, S_j> - u_i - v_j
        excess.diagonal(start).fill_(-torch.inf)
        if not float(excess.max()) < -rounding:
            return False
    return True
