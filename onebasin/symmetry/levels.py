# SPDX-License-Identifier: Apache-2.0
"""The groups that act on spaces at a level of symmetry.

`paper` is the rotation paper's set: rotations inside each attention head (of every pair of dimensions by itself, if
rotary embeddings allow no more), neuron permutations in each FFN, optionally a scale per head or pair; the order of
heads and the residual stream are fixed. The other four use every space, and each level contains the one before it:

    permutation   permutations of everything (Git Re-Basin's symmetries)
    orthogonal    also rotations wherever no nonlinearity prevents them, including the residual stream
    full          also positive scales
    invertible    also any invertible map inside attention heads
"""

from __future__ import annotations

from collections.abc import Collection

from onebasin.settings import refuse_choice

from .groups import (
    Factors,
    Fixed,
    Group,
    Invertible,
    Orthogonal,
    OrthogonalFixingOnes,
    PairSigns,
    Permutation,
    Rotary,
    ScaledOrthogonal,
    ScaledPermutation,
    SignedPermutation,
    Signs,
)
from .tables.signature import MOVES, Signature

LEVELS = ("paper", "permutation", "orthogonal", "full", "invertible")
PARTS = ("attention", "ffn", "stream", "head")
RESCALE = ("none", "after", "joint")


def acting_groups(
    signature: Signature,
    level: str = "paper",
    *,
    rescale: str = "none",
    parts: Collection[str] | None = None,
    layers: Collection[int] | None = None,
) -> dict[str, Group]:
    """Return root space -> group, for the spaces that may move.

    Args:
        signature: Of the model.
        level: One of `LEVELS`.
        rescale: One of `RESCALE`: scales of heads and pairs.
        parts: Only these of `PARTS` (default: all).
        layers: Only these (default: all); spaces shared by all layers are not affected.

    Raises:
        ValueError: The level, a part, the rescaling or a layer is unknown.
    """
    refuse_choice("match", level, LEVELS)
    refuse_choice("rescale", rescale, RESCALE)
    for part in parts or []:
        refuse_choice("part", part, PARTS)
    unknown = set(layers or ()) - set(signature.layers)
    if unknown:
        raise ValueError(f"there is no layer {min(unknown)}; layers run from 0 to {max(signature.layers, default=-1)}")
    # A single neuron of an expert, or a single expert, does not move, but leads to the spaces inside it.
    steps = {outer for space in signature.spaces.values() if len(space.batch) > 1 for outer in space.batch}
    gains = set[str]()
    if level == "paper":  # which does not fold them away
        scaling = (entry for entry in signature.tensors.values() if entry.scaled)
        gains = {signature.root[leaf.space] for entry in scaling for leaf in signature.leaves(entry)}
    groups: dict[str, Group] = {}
    for root, kind in signature.kinds.items():
        space = signature.spaces[root]
        wanted = (
            root not in gains
            and (parts is None or space.part in parts)
            and (layers is None or space.layer is None or space.layer in layers)
        )
        group = _group(kind, space.part, space.size > 1 or root in steps, level, rescale) if wanted else None
        if group is not None:
            groups[root] = group
    return groups


def _group(kind: str, part: str, several: bool, level: str, rescale: str) -> Group | None:
    permutation = Permutation() if "permute" in MOVES[kind] and several else None
    if level == "permutation" or (level == "paper" and part == "ffn"):
        return permutation
    if not MOVES[kind] or (level == "paper" and part != "attention"):
        return None
    scaled = level != "orthogonal" and rescale != "none"
    if kind == "linear":
        if level == "invertible" and part == "attention":
            return Invertible()
        return ScaledOrthogonal(joint=rescale == "joint") if scaled else Orthogonal()
    if kind in ("rotary", "interleaved"):
        return Rotary(kind == "interleaved", rescale if scaled else "none")
    if kind in ("pair turns", "next turns"):
        return Rotary(kind == "next turns")
    if kind in ("pair signs", "next signs"):
        return PairSigns(kind == "next signs")
    if kind == "signs":
        return Signs()
    if level == "paper":
        return None
    if kind == "permutation":
        return permutation
    if kind == "odd":
        return SignedPermutation()
    if kind == "relu":
        return ScaledPermutation() if level != "orthogonal" else permutation
    if kind == "factor":
        return Factors() if level != "orthogonal" else Signs()
    return OrthogonalFixingOnes() if kind == "ones" else Orthogonal()


def largest_group(kind: str) -> Group:
    """Return the largest group that may act on a space of this kind (see `tables.signature.MOVES`)."""
    return _group(kind, "attention", True, "invertible", "joint") or Fixed()
