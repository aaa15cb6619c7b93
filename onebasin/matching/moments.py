# SPDX-License-Identifier: Apache-2.0
"""Cross-moments of one space: what its best element depends on while every other space is held fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from onebasin.symmetry import Moments, Signature
from onebasin.symmetry.axes import Leaf, blocks

Pair = tuple[str, Tensor, Tensor, float]  # role, anchor, source, weight in the objective


def cross_moments(signature: Signature, root: str, pairs: Iterable[Pair]) -> Moments:
    """Moments of `root`, one matrix for every entry of the spaces it is batched over: (*batch, n, n)."""
    batch = signature.spaces[root].batch
    total: Moments | None = None
    for anchor, source, leaf, weight in _views(signature, root, pairs, batch):
        total = _add(total, anchor @ source.mT, source.square().sum(-1), leaf.dual, weight)
    if total is None:
        raise ValueError(f"no tensor touches the space '{root}'")
    return total


def pairwise_moments(signature: Signature, outer: str, inner: str, pairs: Iterable[Pair]) -> Moments:
    """Moments of `inner` for every pair of (anchor, source) entries of `outer`, which it is batched over.

    Matrices (h, h, n, n), norms (h, h, n), for `Wreath.nearest`. One GEMM of all heads against all heads.
    """
    total: Moments | None = None
    for anchor, source, leaf, weight in _views(signature, inner, pairs, (outer,)):
        h, n, _ = source.shape
        cross = (anchor.flatten(0, 1) @ source.flatten(0, 1).mT).view(h, n, h, n).transpose(1, 2)
        norms = source.square().sum(-1).expand(h, h, n)
        total = _add(total, cross, norms, leaf.dual, weight)
    if total is None:
        raise ValueError(f"no tensor touches the space '{inner}'")
    return total


def outer_moments(signature: Signature, outer: str, inner: Collection[str], pairs: Iterable[Pair]) -> Tensor | None:
    """What `outer` gains from blocks in which none of the `inner` spaces moves (T5's relative bias), (h, h)."""
    matrix: Tensor | None = None
    for anchor, source, _, weight in _views(signature, outer, pairs, (), without=inner):
        gain = weight * (anchor @ source.mT)
        matrix = gain if matrix is None else matrix + gain
    return matrix


def _views(
    signature: Signature, root: str, pairs: Iterable[Pair], batch: tuple[str, ...], without: Collection[str] = ()
) -> Iterable[tuple[Tensor, Tensor, Leaf, float]]:
    """Every place where `root` occurs, as (*batch, n, rest) views of anchor and source."""
    for role, anchor, source, weight in pairs:
        entry = signature.tensors[role]
        if entry.norm is not None and signature.root[entry.norm.target] == root and anchor.dim() != 1:
            continue
        cut = zip(blocks(anchor, entry.axes, signature.sizes), blocks(source, entry.axes, signature.sizes), strict=True)
        for (a, leaves), (s, _) in cut:
            roots = [signature.root.get(leaf.space, "") for leaf in leaves]
            if any(root in roots for root in without):
                continue
            for dim, (leaf, here) in enumerate(zip(leaves, roots, strict=True)):
                if here == root:
                    over = tuple(roots.index(outer) for outer in batch)
                    yield _front(a, over, dim), _front(s, over, dim), leaf, weight


def _front(x: Tensor, batch: tuple[int, ...], dim: int) -> Tensor:
    rest = tuple(d for d in range(x.dim()) if d != dim and d not in batch)
    moved = x.permute(*batch, dim, *rest)
    return moved.reshape(*moved.shape[: len(batch) + 1], -1)


def _add(total: Moments | None, cross: Tensor, norms: Tensor, dual: bool, weight: float) -> Moments:
    cross, norms = weight * cross if weight != 1 else cross, weight * norms if weight != 1 else norms
    zero, none = (torch.zeros_like(cross), torch.zeros_like(norms)) if total is None else (total.primal, total.primal_norm)
    if total is None:
        return Moments(zero, cross, none, norms) if dual else Moments(cross, zero, norms, none)
    if dual:
        return Moments(total.primal, total.dual + cross, total.primal_norm, total.dual_norm + norms)
    return Moments(total.primal + cross, total.dual, total.primal_norm + norms, total.dual_norm)
