# SPDX-License-Identifier: Apache-2.0
"""A narrow model inside a wider one, exactly: fewer neurons or heads, a narrower stream.

Every space is embedded isometrically, x -> E x with E^T E = 1: tensors that write it take E, and so do tensors that
read it, since W E^T E x = W x. E pads with zeros. For a stream under LayerNorm it also maps the normalized ones
direction to that of the wider space, so that vectors of sum zero keep that sum.

A norm over w places instead of n divides by a root mean square that is sqrt(n / w) times as large, so its weight is
multiplied by sqrt(n / w), and the stored eps by n / w. If attention divides its logits by the root of the head size and
heads get wider, its queries are multiplied by sqrt(w / n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..groups.orthogonal import complement_of_ones
from ..tables.axes import blocks
from ..tables.signature import MOVES, Entry, Signature


def widening(narrow: Signature, wide: Signature) -> dict[str, tuple[int, int]]:
    """Return root space -> (narrow, wide) size, for those that differ.

    Raises ValueError if the `wide` model is the narrower one in a space, if no group acts on the space (vocabulary,
    classes), or if a LayerNorm writes back into it, since its mean would change.
    """
    grown: dict[str, tuple[int, int]] = {}
    for key, space in narrow.spaces.items():
        root = narrow.root[key]
        if key not in wide.spaces or space.kind in ("rows", "labels"):
            continue
        n, w = space.size, wide.spaces[key].size
        if n == w:
            continue
        if n > w:
            raise ValueError(f"the space '{key}' has {n} dimensions here and {w} in the anchor: "
                             "the anchor must be the wider model")  # fmt: skip
        if not MOVES[narrow.kinds[root]]:
            raise ValueError(
                f"the space '{key}' has {n} entries in one model and {w} in the other, and cannot be widened"
            )
        if narrow.kinds[root] == "permutation" and any(
            norm.kind == "layernorm" and narrow.root[norm.source] == root for norm in narrow.norms
        ):
            raise ValueError(f"a LayerNorm writes back into '{key}': it cannot be widened from {n} to {w} exactly")
        grown[root] = (n, w)
    return grown


def embedding(kind: str, n: int, w: int, like: Tensor) -> Tensor:
    """Return the isometry E (w, n) of a space of this kind."""
    if kind != "ones":
        return torch.eye(w, n).to(like)
    inner, outer = complement_of_ones(n), complement_of_ones(w)[:, : n - 1]
    return (outer @ inner.mT + 1 / math.sqrt(w * n)).to(like)


def widen(narrow: Signature, tensors: Mapping[str, Tensor], wide: Signature) -> dict[str, Tensor]:
    """Return the narrow model's tensors (role -> canonical form) in the wide model's shapes, with the same function.

    Roles that the wide model lacks are left out. Raises ValueError as `widening` does.
    """
    grown = widening(narrow, wide)
    sizes = {key: wide.sizes.get(key, size) for key, size in narrow.sizes.items()}
    for key, space in narrow.spaces.items():  # rows and labels keep their size
        if space.kind in ("rows", "labels"):
            sizes[key] = space.size
    found = {}
    for role, tensor in tensors.items():
        if role not in wide.tensors:
            continue
        mine, theirs = narrow.tensors[role], wide.tensors[role]
        if mine.diagonal:
            found[role] = _norm_weight(narrow, wide, mine, tensor, grown)
            continue
        shape = [old if old == new or _rows(narrow, axis) else new
                 for old, new, axis in zip(tensor.shape, theirs.shape, mine.axes, strict=True)]  # fmt: skip
        out = tensor.new_zeros(shape)
        cut = zip(blocks(tensor, mine.axes, narrow.sizes), blocks(out, mine.axes, sizes), strict=True)
        for (piece, leaves), (target, _) in cut:
            factor = 1.0
            for dim, leaf in enumerate(leaves):
                root = narrow.root.get(leaf.space, "")
                if root not in grown:
                    continue
                n, w = grown[root]
                if narrow.kinds[root] == "ones":
                    piece = torch.tensordot(piece, embedding("ones", n, w, piece), ([dim], [1])).movedim(-1, dim)
                if narrow.spaces[leaf.space].name in narrow.temperature and not leaf.dual:
                    factor *= math.sqrt(w / n)
            target[tuple(slice(0, length) for length in piece.shape)] = factor * piece
        found[role] = out
    return found


def eps_factor(narrow: Signature, wide: Signature) -> float:
    """Return the factor of the norms' eps: n / w of the stream that they read (1 if its width is the same)."""
    grown = widening(narrow, wide)
    factors = {grown[narrow.root[norm.source]] for norm in narrow.norms if narrow.root[norm.source] in grown}
    if len(factors) > 1:
        raise ValueError("norms over spaces that are widened by different factors share one eps: this cannot be exact")
    return next((n / w for n, w in factors), 1.0)


def _norm_weight(
    narrow: Signature, wide: Signature, entry: Entry, tensor: Tensor, grown: Mapping[str, tuple[int, int]]
) -> Tensor:
    root = narrow.root[list(narrow.leaves(entry))[-1].space]
    if root not in grown:
        return tensor
    n, w = grown[root]
    unit = entry.norm.unit if entry.norm else 1.0  # LayerScale divides by nothing
    gain = (tensor + (1 - unit)) * (math.sqrt(n / w) if entry.norm else 1.0)
    # A constant weight stays a multiple of 1, which any rotation commutes with; others are padded like vectors.
    constant = bool((gain == gain.flatten()[0]).all())
    if entry.norm and entry.norm.copies > 1 and not constant:
        raise ValueError(f"'{entry.name}' normalizes several vectors as one; it must be folded to be widened")
    out = gain.new_full(wide.tensors[entry.role].shape, float(gain.flatten()[0]) if constant else 0.0)
    out[tuple(slice(0, length) for length in gain.shape)] = gain
    return out.sub(1 - unit)


def _rows(signature: Signature, axis: object) -> bool:
    space = signature.spaces.get(getattr(axis, "space", ""))
    return space is not None and space.kind in ("rows", "labels")
