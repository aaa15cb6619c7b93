# SPDX-License-Identifier: Apache-2.0
"""Cross-moments of one space, which determine its best element while all other spaces are fixed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onebasin.symmetry import Moments, Signature
from onebasin.symmetry.groups.elements import Element, Monomial
from onebasin.symmetry.groups.gemm import gemm
from onebasin.symmetry.tables.axes import Leaf
from onebasin.symmetry.tables.signature import MOVES

Pair = tuple[str, Tensor, Tensor, float]  # role, anchor, source, weight in the objective
View = tuple[Tensor, Tensor, Leaf, float]  # anchor, source, leaf, weight
Product = tuple[Tensor, Tensor]  # A, S: A S^T, still to be formed
Term = tuple[bool, float, Tensor | Product, Tensor, Tensor | None]  # dual, weight, cross, norms, Gram matrix


def cross_moments(
    signature: Signature,
    root: str,
    pairs: Iterable[Any],
    gram: bool = False,
    isometry: bool = False,
    read: Callable[[Any], Pair] = lambda pair: pair,
    run: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> Moments:
    """Return the moments of `root`, one matrix for every entry of the spaces it is batched over: (*batch, n, n).

    Args:
        signature: Of the source.
        root: The space.
        pairs: (anchor, source) tensors that touch it, or the arguments of `read`.
        gram: Also sum the source's own Gram matrices, for groups that need them.
        isometry: Whether the group's elements are isometries, which preserve norms and act on readers as on writers:
            norms are then zero, and all terms are summed in `primal`.
        read: Returns the pair of an item of `pairs`; it is dropped once its terms are computed.
        run: `map`, or a function that works ahead and computes the products; terms are added up in order.
    """
    diagonals: list[Tensor] = []

    def of(item: Any) -> tuple[list[Term], list[Tensor]]:
        pair = read(item)
        terms: list[Term] = []
        for anchor, source, leaf, weight in _views(signature, root, [pair]):
            length = source.new_zeros(source.shape[:-1]) if isometry else source.square().sum(-1)
            cross = (anchor, source) if run is map else gemm(anchor, source)
            dual = leaf.dual and not isometry
            terms.append((dual, weight, cross, length, _gram(source) if gram else None))
        return terms, [weight * (a @ s.mT) for a, s, _, weight in _views(signature, root, [pair], diagonal=True)]

    def terms() -> Iterator[Term]:
        for found, diagonal in run(of, pairs):
            if diagonal:
                diagonals[:] = [sum(diagonal[1:], sum(diagonals, diagonal[0]))]
            yield from found

    moments = _sum(root, terms())
    return replace(moments, diagonal=diagonals[0]) if diagonals else moments


def carried(moments: Moments, element: Element) -> Moments:
    """Return the moments after `element`, an isometry, has acted on the source, without Gram matrices."""
    primal = element.act(moments.primal.mT).mT
    dual = moments.dual if moments.one_sided else element.act(moments.dual.mT).mT
    diagonal = moments.diagonal
    if diagonal is not None and isinstance(element, Monomial):
        diagonal = Monomial(element.index).act(diagonal.mT).mT
    return replace(moments, primal=primal, dual=dual, diagonal=diagonal)


def pairwise_moments(
    signature: Signature, outer: str, inner: str, pairs: Iterable[Pair], gram: bool = False
) -> Moments:
    """Return the moments of `inner` for every pair of (anchor, source) entries of `outer`, which it is batched over.

    One GEMM computes them for all heads against all heads: matrices (*batch of outer, h, h, n, n) and norms (*batch of
    outer, h, h, n), for `Wreath.nearest`.

    gram: also sum the source's own Gram matrices.
    """
    return _sum(inner, _pairwise(_views(signature, inner, pairs), gram))


def _pairwise(views: Iterable[View], gram: bool) -> Iterator[Term]:
    for anchor, source, leaf, weight in views:
        *still, h, n, _ = source.shape
        cross = gemm(anchor.flatten(-3, -2), source.flatten(-3, -2)).view(*still, h, n, h, n).transpose(-3, -2)
        own = _gram(source).unsqueeze(-4).expand(*still, h, h, n, n) if gram else None
        yield leaf.dual, weight, cross, source.square().sum(-1).unsqueeze(-3).expand(*still, h, h, n), own


def _gram(source: Tensor) -> Tensor:
    """Return S S^T in float64: a map of condition c multiplies its rounding by c^2, and that of other terms by c."""
    wide = source.double()
    return wide @ wide.mT


def grouped_moments(
    signature: Signature, outer: str, member: str, inner: str, pairs: Iterable[Pair], gram: bool = False
) -> tuple[Moments | None, Moments | None]:
    """Return the two parts of `inner`'s moments for every pair of entries of `outer`, for `GroupedWreath.nearest`.

    outer: the groups of heads. member: the heads of a group. inner: the space inside them. gram: also sum the source's
    own Gram matrices.

    Returns:
        First from blocks that all members share, `(kv qk')`, as in `pairwise_moments`; then from blocks with `member`
        in between, `(kv group qk)`, for every pair of members as well: matrices (h, h, m, m, n, n).
    """
    pairs = list(pairs)

    def terms() -> Iterator[Term]:
        for role, anchor, source, weight in pairs:
            for (a, leaf, roots), (s, _, _) in zip(
                signature.views(role, anchor, inner), signature.views(role, source, inner), strict=True
            ):
                if member not in roots or signature.tensors[role].diagonal:
                    continue
                place = 2 + [root for root in roots if root not in (outer, inner)].index(member)
                a, s = (as_matrix(view.movedim(place, 1), 2) for view in (a, s))
                h, m, n, _ = s.shape
                cross = gemm(a.flatten(0, 2), s.flatten(0, 2)).view(h, m, n, h, m, n).permute(0, 3, 1, 4, 2, 5)
                own = _gram(s)[None, :, None].expand(h, h, m, m, n, n) if gram else None
                yield leaf.dual, weight, cross, s.square().sum(-1)[None, :, None].expand(h, h, m, m, n), own

    shared = list(_pairwise(_views(signature, inner, pairs, without=[member]), gram))
    single = list(terms())
    return _sum(inner, shared) if shared else None, _sum(inner, single) if single else None


def outer_moments(signature: Signature, outer: str, inner: Collection[str], pairs: Iterable[Pair]) -> Tensor | None:
    """Return the gains of `outer` from blocks in which no `inner` space moves (T5's relative bias), (*batch, h, h)."""
    matrix: Tensor | None = None
    for anchor, source, _, weight in _unmoved(signature, outer, inner, pairs):
        gain = weight * gemm(anchor, source)
        matrix = gain if matrix is None else matrix + gain
    return matrix


def member_gains(signature: Signature, member: str, inner: Collection[str], pairs: Iterable[Pair]) -> Tensor | None:
    """Return the same for members of groups: every pair of groups and of members in them, (h, h, m, m)."""
    terms = list(_pairwise(_unmoved(signature, member, inner, pairs), gram=False))
    return _sum(member, terms).total if terms else None


def _unmoved(signature: Signature, root: str, inner: Collection[str], pairs: Iterable[Pair]) -> Iterator[View]:
    """Yield the blocks with `root` in which no inner space moves: in the weight of a norm, only permutations do."""
    permuting = [space for space in inner if "permute" in MOVES[signature.kinds[space]]]
    for pair in pairs:
        yield from _views(signature, root, [pair], without=inner)
        yield from _views(signature, root, [pair], without=permuting, diagonal=True)


def _views(
    signature: Signature, root: str, pairs: Iterable[Pair], without: Collection[str] = (), diagonal: bool = False
) -> Iterator[View]:
    """Yield the blocks with `root`, as (*batch, n, m) matrices of anchor and source.

    diagonal: those of norms and LayerScale, which are diagonal matrices, instead of those of all other tensors.
    """
    batch = signature.spaces[root].batch
    for role, anchor, source, weight in pairs:
        if signature.tensors[role].diagonal != diagonal:
            continue
        for (a, leaf, roots), (s, _, _) in zip(
            signature.views(role, anchor, root), signature.views(role, source, root), strict=True
        ):
            if not any(other in roots for other in without):
                yield as_matrix(a, len(batch)), as_matrix(s, len(batch)), leaf, weight


def evened(matrix: Tensor) -> Tensor:
    """X -> (X X^T)^(-1/4) X, (n, m): singular values are replaced by their square roots.

    This commutes with rotations of the rows, so a planted rotation is still found; but a few strong directions, such as
    the one shared by all tokens that were never trained, no longer decide alone.
    """
    values, vectors = torch.linalg.eigh(matrix @ matrix.mT)
    scale = values.clamp_min(1e-6 * float(values[-1])) ** -0.25
    result: Tensor = (vectors * scale) @ (vectors.mT @ matrix)
    return result


def perturbed(moments: Moments, generator: torch.Generator) -> Moments:
    """Return moments with noise of a tenth of their size, for another start of a descent."""
    size = moments.primal.square().mean().sqrt()
    noise = torch.randn(moments.primal.shape, generator=generator).to(moments.primal)
    return replace(moments, primal=moments.primal + 0.1 * size * noise)


def as_matrix(view: Tensor, batch: int) -> Tensor:
    """(*batch, n, *rest) -> (*batch, n, m); m = 1 without a rest."""
    return view.reshape(*view.shape[: batch + 1], -1)


def _sum(root: str, terms: Iterable[Term]) -> Moments:
    """Add up the terms of the tensors that write the space (primal) and of those that read it (dual).

    Raises ValueError if there are none.
    """
    sums: dict[bool, list[Tensor]] = {}
    for reads, weight, cross, *statistics in terms:
        # For all pairs, a statistic may be an expanded tensor; a product would take the memory of all of it.
        others = [s if weight == 1 else weight * s for s in statistics if s is not None]
        if reads in sums:
            total, *before = sums[reads]
            sums[reads] = [_added(total, weight, cross), *map(torch.add, before, others)]
        else:
            sums[reads] = [_added(None, weight, cross), *others]
    if not sums:
        raise ValueError(f"no tensor touches the space '{root}'")
    one_sided = True not in sums
    for side in (False, True):
        if side not in sums:
            sums[side] = [statistic.new_zeros(()).expand_as(statistic) for statistic in sums[not side]]
    primal, dual = sums[False], sums[True]
    found = Moments(primal[0], dual[0], primal[1], dual[1], one_sided=one_sided)
    return replace(found, primal_gram=primal[2], dual_gram=dual[2]) if len(primal) == 3 else found


def _added(total: Tensor | None, weight: float, cross: Tensor | Product) -> Tensor:
    """Return total + weight * cross, in place: the matrices of wide spaces are large, and fresh memory costs time."""
    if isinstance(cross, tuple):
        anchor, source = cross
        if total is not None and total.dim() == 2:
            return gemm(anchor, source if weight == 1 else weight * source, onto=total)
        cross = gemm(anchor, source)
    cross = cross if weight == 1 else weight * cross
    return cross if total is None else total.add_(cross)
