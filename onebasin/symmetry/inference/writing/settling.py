# SPDX-License-Identifier: Apache-2.0
"""Fixing what a table cannot express: norms, gains, factors and degrees, before spaces are found."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ...tables.signature import MOVES, bias_beside
from ..atoms import LINEAR, PERMUTE, Atom, Axis, hold, restrict
from ..trace import Gain, Normed, Trace
from ..unification import unify
from .draft import Draft, Found


def settle(draft: Draft) -> None:
    """Restrict spaces to what the lines of norms, gains and factors can express."""
    trace, found = draft.trace, draft.found
    tied = [name for one in found if one.tied for name in (one.parameter, draft.original(one).parameter)]
    draft.gains = settle_gains(trace, tied, draft.style.norms)
    draft.free = settle_norms(trace.norms, found)
    if settle_ties(draft):
        draft.free = settle_norms(trace.norms, found)
    for norm in () if draft.style.norms else trace.norms:
        if norm.kind == "layernorm":
            stays = norm.target is not None and not norm.target.moves
            restrict(norm.source, frozenset() if stays else PERMUTE, "not written as a norm")
    settle_factors(axis for one in found for axis in one.axes if axis is not None)
    draft.degrees = settle_degrees(found)


def left_by(norm: Normed, free: bool) -> frozenset[str]:
    """Return the moves that a norm allows in the space that it reads, if its weight can move (`free`) or not."""
    names = ("ones", "orthogonal") if free else ("permutation", "odd")
    return MOVES[names[norm.kind != "layernorm"]]


def settle_gains(trace: Trace, tied: Collection[str], wanted: bool) -> dict[str, Gain]:
    """Return the vectors that can move into the matrices before them, since neither has another use. All others
    restrict their space to permutations."""
    kin = {name: re.sub(r"\.\d+\.", ".{}.", name) for name in trace.gains}
    lost = {kin[name] for name, gain in trace.gains.items() if not wanted or {name, *gain.of} & set(tied) or any(
        trace.uses[use] != gain.times for use in (gain.of, ("", name), ("", gain.of[0])))}  # fmt: skip
    for name, gain in trace.gains.items():
        if kin[name] in lost:
            restrict(gain.source, PERMUTE, "a gain")
    return {name: gain for name, gain in trace.gains.items() if kin[name] not in lost}


def settle_norms(norms: Sequence[Normed], found: Sequence[Found]) -> dict[str, bool]:
    """Return weight -> whether the norm has an output space of its own: either only parameters read it, or write what
    it is multiplied by, so that the weight can move, or it is fixed (as an output of the model, say), and so is the
    norm's input.

    All others write back into their own space, which restricts it to permutations (and signs, under an RMSNorm).
    """
    free = {norm.weight: True for norm in norms}
    normal = free.keys() | {norm.bias for norm in norms}
    added = {(leaf.top.atom, leaf.top.dual) for one in found if one.parameter not in normal
             for axis in one.axes if axis is not None for leaf in axis.leaves}  # fmt: skip
    kin = {norm.weight: re.sub(r"\.\d+\.", ".{}.", norm.weight) for norm in norms}  # the same norm of all layers
    changed = True
    while changed:
        changed = False
        tops = [norm.target.top.atom for norm in norms if norm.target is not None and free[norm.weight]]
        for norm in norms:
            assert norm.target is not None
            source, target = norm.source.top, norm.target.top
            alone = (
                not target.atom.parts and _one_vector(norm.source)
                and (target.moves == LINEAR or not target.moves)
                and not (target.moves and target.atom.written and (target.atom, target.dual) in added)
                and target.atom is not source.atom and tops.count(target.atom) == 1
            )  # fmt: skip
            alike = all(free[other] for other in free if kin[other] == kin[norm.weight])
            if free[norm.weight] and not (alone and alike):
                free[norm.weight] = False
                changed = True
                unify(norm.source, norm.target, "what a norm puts out is not only read")
                left = PERMUTE if norm.source.cat else left_by(norm, free=False)  # written as a vector, which has signs
                restrict(norm.source, left, "the weight of a norm", norm=True)
    return free


def settle_ties(draft: Draft) -> bool:
    """Give tied tensors the same axes where one is divided into more parts than the other, since a table could not say
    which of them correspond. Return whether there were any."""
    apart = False
    for one in draft.found:
        for a, b in zip(one.axes, draft.original(one).axes, strict=True) if one.tied else ():
            if a is not None and b is not None and _parts(a) != _parts(b):
                unify(a, b, "tied to what is divided")
                apart = True
    return apart


def settle_parts(draft: Draft) -> None:
    """Fix what norms with an output space of their own read and write, where layers of the same structure divided it
    into parts: a table has no such norm."""
    for norm in draft.trace.norms:
        assert norm.target is not None
        if draft.free[norm.weight] and not (_one_vector(norm.source) and _one_vector(norm.target)):
            for axis in (norm.source, norm.target):
                restrict(axis, frozenset(), "a norm of several parts")


def _one_vector(axis: Axis) -> bool:
    """Whether this is the axis of one vector, or of several side by side in which nothing moves."""
    return not (axis.cat or _parts(axis) > 1) or not any(leaf.moves for leaf in axis.leaves)


def _parts(axis: Axis) -> int:
    return sum(leaf.size > 1 for leaf in axis.leaves)


def settle_factors(axes: Iterable[Axis]) -> None:
    """Fix factors of entries that are parts side by side, which a table does not have."""
    for axis in axes:
        if axis.flat and any(part.cat for part in axis.parts):
            hold((part for part in axis.parts if part.size == 1), "a factor of parts side by side")
        settle_factors(axis.parts)


def settle_degrees(found: Sequence[Found]) -> dict[str, tuple[int, Found]]:
    """Return name -> (power, other matrix) for matrices whose rows may be multiplied by positive factors, if another
    matrix is divided by that power of them. A space cannot express this, so the factors are fixed."""
    uses: dict[Atom, list[tuple[Found, bool, int]]] = defaultdict(list)
    for one in found:
        for axis in one.axes:
            leaves = [] if axis is None else [leaf.top for leaf in axis.leaves if leaf.size == 1]
            for leaf in dict.fromkeys(leaves):
                uses[leaf.atom].append((one, leaf.dual, leaves.count(leaf) if axis and axis.flat else 0))
    degrees: dict[str, tuple[int, Found]] = {}
    for atom, each in uses.items():
        if "scale" not in atom.moves or (max(count for *_, count in each) < 2 and "sign" in atom.moves):
            continue
        atom.own = frozenset()
        first, *others = each
        readers = [use for use in others if use[1] != first[1]]
        biases = [use for use in others if use[1] == first[1]]
        alone = all(one.name == bias_beside(first[0].name) for one, *_ in biases)
        if len(readers) == 1 and alone and readers[0][2] and all(count == 1 for *_, count in (first, *biases)):
            degrees[first[0].name] = readers[0][2], readers[0][0]
    return degrees
