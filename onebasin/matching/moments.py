# SPDX-License-Identifier: Apache-2.0
"""Cross-moments of one space: what its best element depends on while every other space is held fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from onebasin.symmetry import Moments, Signature
from onebasin.symmetry.axes import Leaf

Pair = tuple[str, Tensor, Tensor, float]  # role, anchor, source, weight in the objective
Term = tuple[bool, float, Tensor, Tensor, Tensor | None]  # dual, weight, cross, norms, Gram matrix


def cross_moments(signature: Signature, root: str, pairs: Iterable[Pair], gram: bool = False) -> Moments:
    """Moments of `root`, one matrix for every entry of the spaces it is batched over: (*batch, n, n).

    gram: also the source's own Gram matrices, for groups that need them.
    """
    return _sum(
        root,
        (
            (leaf.dual, weight, anchor @ source.mT, source.square().sum(-1), source @ source.mT if gram else None)
            for anchor, source, leaf, weight in _views(signature, root, pairs)
        ),
    )


def pairwise_moments(signature: Signature, outer: str, inner: str, pairs: Iterable[Pair], gram: bool = False) -> Moments:
    """Moments of `inner` for every pair of (anchor, source) entries of `outer`, which it is batched over.

    Matrices (h, h, n, n), norms (h, h, n), for `Wreath.nearest`. One GEMM of all heads against all heads.
    """

    def terms() -> Iterator[Term]:
        for anchor, source, leaf, weight in _views(signature, inner, pairs):
            h, n, _ = source.shape
            cross = (anchor.flatten(0, 1) @ source.flatten(0, 1).mT).view(h, n, h, n).transpose(1, 2)
            own = (source @ source.mT).expand(h, h, n, n) if gram else None
            yield leaf.dual, weight, cross, source.square().sum(-1).expand(h, h, n), own

    return _sum(inner, terms())


def outer_moments(signature: Signature, outer: str, inner: Collection[str], pairs: Iterable[Pair]) -> Tensor | None:
    """What `outer` gains from blocks in which none of the `inner` spaces moves (T5's relative bias), (h, h)."""
    matrix: Tensor | None = None
    for anchor, source, _, weight in _views(signature, outer, pairs, without=inner):
        gain = weight * (anchor @ source.mT)
        matrix = gain if matrix is None else matrix + gain
    return matrix


def _views(
    signature: Signature, root: str, pairs: Iterable[Pair], without: Collection[str] = ()
) -> Iterator[tuple[Tensor, Tensor, Leaf, float]]:
    """Every place where `root` occurs, as (*batch, n, m) matrices of anchor and source."""
    batch = signature.spaces[root].batch
    for role, anchor, source, weight in pairs:
        for (a, leaf, roots), (s, _, _) in zip(
            signature.views(role, anchor, root), signature.views(role, source, root), strict=True
        ):
            if not any(other in roots for other in without):
                yield as_matrix(a, len(batch)), as_matrix(s, len(batch)), leaf, weight


def as_matrix(view: Tensor, batch: int) -> Tensor:
    """(*batch, n, *rest) -> (*batch, n, m); m = 1 where there is no rest."""
    return view.reshape(*view.shape[: batch + 1], -1)


def _sum(root: str, terms: Iterable[Term]) -> Moments:
    """Add up the terms of tensors that write the space and of those that read it. Raises ValueError if there are none."""
    sums: dict[bool, list[Tensor | None]] = {}
    for dual, weight, *term in terms:
        if weight != 1:
            term = [None if statistic is None else weight * statistic for statistic in term]
        if dual in sums:
            sums[dual] = [_plus(old, new) for old, new in zip(sums[dual], term, strict=True)]
        else:
            sums[dual] = term
    if not sums:
        raise ValueError(f"no tensor touches the space '{root}'")
    some = next(iter(sums.values()))
    nothing = [None if statistic is None else torch.zeros_like(statistic) for statistic in some]
    (primal, primal_norm, primal_gram), (dual, dual_norm, dual_gram) = sums.get(False, nothing), sums.get(True, nothing)
    assert primal is not None and dual is not None and primal_norm is not None and dual_norm is not None
    return Moments(primal, dual, primal_norm, dual_norm, primal_gram, dual_gram)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b
