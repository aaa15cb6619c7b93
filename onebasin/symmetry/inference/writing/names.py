# SPDX-License-Identifier: Apache-2.0
"""Names for spaces, by what the model does with them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from ...tables.signature import MOVES, kind_of
from ..atoms import PERMUTE
from ..trace import Normed
from .draft import Draft, Place, atoms_of


@dataclass(frozen=True)
class _Clues:
    """The clues to the names of spaces.

    targets: atoms of outputs of norms. asked: atoms where queries meet keys, and whether these are duals. holds: places
    within heads -> "vo" or "qk". attention: places that number heads. around: places on one axis with these. count: how
    often a place is in a tensor. first: the first tensor that has it.
    """

    targets: dict[int, Normed]
    asked: dict[int, bool]
    holds: dict[int, str]
    attention: set[int]
    around: set[int]
    count: Counter[int]
    first: dict[int, int]


def name_spaces(draft: Draft) -> None:
    """Give every space a name, a part of the model, and its properties; spaces of the whole model come first."""
    clues = _clues(draft)
    used = Counter[str]()
    order = sorted(range(len(draft.places)), key=lambda n: (bool(draft.places[n].heading), clues.first.get(n, 0)))
    for number in order:
        place = draft.places[number]
        name, place.part = _named(draft, clues, number)
        used[name] += 1
        place.name = name if used[name] == 1 else f"{name}{used[name]}"
        if kind_of(place.moves) == "linear" and name in ("vo", "qk"):
            place.properties.append("passes" if name == "vo" else "invisible")
            if name == "qk":
                _queries_plain(draft, place, clues.asked)


def _clues(draft: Draft) -> _Clues:
    trace = draft.trace
    passed = {id(leaf.top.atom)
              for axis, what in trace.passes if what == "passes" for leaf in list(axis.leaves)[-1:]}  # fmt: skip
    asked = {id(leaf.home.atom): leaf.home.dual
             for axis, what in trace.passes if what == "met" for leaf in axis.leaves}  # fmt: skip
    targets = {id(n.target.top.atom): n for n in trace.norms if n.target is not None and draft.free[n.weight]}
    holds: dict[int, str] = {}
    for number, place in enumerate(draft.places):
        keys = {id(axis.atom) for axis in place.atoms}
        if keys & passed:
            holds[number] = "vo"
        elif keys & asked.keys() and not place.moves <= PERMUTE | MOVES["factor"]:
            holds[number] = "qk"
    attention = {outer for number in holds for outer in draft.places[number].per}
    around: set[int] = set()
    count, first = Counter[int](), dict[int, int]()
    for at, one in enumerate(draft.found):
        for axis in one.axes:
            numbers = draft.spaces_on(axis) if axis is not None and axis.flat else set()
            if numbers & attention:
                around |= numbers
        for axis in draft.axes(one):
            for leaf in axis.leaves:
                number = draft.of[id(leaf.top.atom)]
                count[number] += 1
                first.setdefault(number, at)
    return _Clues(targets, asked, holds, attention, around, count, first)


def _named(draft: Draft, clues: _Clues, number: int) -> tuple[str, str]:
    """Return a name for a space, without a number, and the part of the model to which it belongs."""
    place = draft.places[number]
    norm = next((clues.targets[id(axis.atom)] for axis in place.atoms if id(axis.atom) in clues.targets), None)
    kind = kind_of(place.moves)
    holds, attention = clues.holds.get(number), clues.attention
    if norm is not None:
        return _target(norm.weight), ""
    if kind == "factor":
        return "scale", "ffn"
    if holds is not None and kind != "permutation":
        return "rope" if holds == "qk" and kind in ("rotary", "interleaved") else holds, "attention"
    if number in attention:
        return "group" if any(outer in attention for outer in place.per) else "head", "attention"
    if number in clues.around and kind == "permutation":
        return "group", "attention"
    if number in draft.outer and kind == "permutation":
        deeper = any(number in other.per and other.moves <= PERMUTE for other in draft.places)
        return "expert" if deeper else "ffn", "ffn"
    if kind == "fixed":
        why = {reason for axis in place.atoms for reason in axis.atom.why}
        if "output" in why and _counts_labels(draft, place):
            return "label", ""
        return "vocab" if "token ids" in why or "output" in why else "fixed", ""
    if not place.heading and clues.count[number] > 3:
        return "stream", "stream"
    if kind in ("permutation", "relu", "odd"):
        return ("ffn", "ffn") if place.heading else ("inner", "head")
    return ("rank", "attention") if place.heading else ("inner", "head")


def _counts_labels(draft: Draft, place: Place) -> bool:
    """Whether the size of a space is the number of classes, and only tensors of a head have it."""
    keys = {id(axis.atom) for axis in place.atoms}
    having = [one.name for one in draft.found if keys & atoms_of(one)]
    return place.size == draft.labels and bool(draft.prefix) and not any(
        name.startswith(draft.prefix) for name in having)  # fmt: skip


def _queries_plain(draft: Draft, place: Place, asked: dict[int, bool]) -> None:
    """Reverse a space if keys come first: `invisible` applies to the dual, which has to be the keys'."""
    atoms = [id(axis.atom) for axis in place.atoms]
    if any(atom in asked and asked[atom] != draft.turned[atom] for atom in atoms):
        draft.turned.update({atom: not draft.turned[atom] for atom in atoms})


def _target(weight: str) -> str:
    words = [word for word in weight.split(".")[:-1] if not word.isdigit()]
    return re.sub(r"\W", "_", words[-1] if words else "normed") + "_out"
