# SPDX-License-Identifier: Apache-2.0
"""The declarations of spaces, and the sizes that a table has to state."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from ...tables.axes import parse, space_leaves
from ...tables.signature import kind_of
from ..atoms import Axis
from .draft import Draft, Place, atoms_of
from .layers import Homes, homes_of
from .settling import left_by

ListOf = Callable[[Sequence[str]], tuple[str, Sequence[str]] | None]


def declarations(draft: Draft, list_of: ListOf) -> Iterator[str]:
    """Yield the lines of the spaces that lines of tensors use, except those that norms write."""
    used = set(re.findall(r"[A-Za-z_]\w*", " ".join(line.axes for line in draft.lines)))
    targets = {id(n.target.top.atom) for n in draft.trace.norms if n.target is not None and draft.free[n.weight]
               and (draft.style.norms or n.kind != "layernorm") and n.target.moves}  # fmt: skip
    homes = homes_of(draft)
    for place in draft.places:
        if place.name not in used or any(id(axis.atom) in targets for axis in place.atoms):
            continue
        per = (["layer"] if place.heading else []) + [draft.places[outer].name for outer in place.per]
        properties = place.properties if draft.style.constants else []
        if draft.style.sums and _begins_anew(draft, place):
            properties = [*properties, "post-norm"]
        after = [place.part, *([f"per {', '.join(per)}"] if per else []), *properties]
        declared = _declared(draft, place)
        yield " ".join([place.name, declared, *after]).rstrip() + _cost(place)
        for kind, asked in _in_some_layers(draft, place, declared, homes, list_of):
            yield " ".join([place.name, kind, *after, f"; when {asked}"])
    yield from (f"{name} fixed{' per layer' if layer else ''}" for name, layer in draft.kept)


def _cost(place: Place) -> str:
    """Return a comment on a fixed space: the operation that fixed it, of the first of its axes that was."""
    why = [axis.top.atom.why[0] for axis in place.atoms if not axis.moves and axis.top.atom.why]
    return f"  # fixed by {why[0]}" if kind_of(place.moves) == "fixed" and why else ""


def _in_some_layers(
    draft: Draft, place: Place, declared: str, homes: Homes, list_of: ListOf
) -> Iterator[tuple[str, str]]:
    """Yield the kinds of a space in some layers other than the declared one, with conditions on a list of the
    configuration."""
    layers: dict[int, list[Axis]] = defaultdict(list)
    for axis in place.atoms:
        if (home := homes.get(id(axis.atom))) is not None:
            layers[home[1]].append(axis)
    if not place.heading or set(layers) != set(range(len(layers))) or kind_of(place.moves) == "fixed":
        return
    kinds = [_declared(draft, Place(layers[number], place.heading)) for number in range(len(layers))]
    if len(set(kinds)) > 1 and (listed := list_of(kinds)) is not None:
        named = dict(zip(listed[1], kinds, strict=True))
        yield from ((kind, f"{listed[0]}[layer]={item}") for item, kind in named.items() if kind != declared)


def _declared(draft: Draft, place: Place) -> str:
    """Return the kind of a space without the restrictions by norms, if their lines in the table imply these."""
    if re.fullmatch(r"label\d*", place.name):
        return "labels"
    keys = {id(axis.atom) for axis in place.atoms}
    left = [left_by(norm, draft.free[norm.weight]) for norm, read in draft.written_norms if keys & read]
    own = frozenset.intersection(*(axis.top.atom.own for axis in place.atoms))
    implied = kind_of(own.intersection(*left)) == kind_of(place.moves)
    return kind_of(own if implied else place.moves)


def _begins_anew(draft: Draft, place: Place) -> bool:
    """Whether all norms of a stream, or all but a last one, write back into it, have biases, and follow each other,
    unlike those of an encoder, whose output a decoder reads in all layers."""
    keys = {id(axis.atom) for axis in place.atoms}
    norms = [] if place.heading else [n for n in draft.trace.norms if id(n.source.top.atom) in keys]
    weights = {norm.weight for norm in norms}
    blocks = {draft.parsed(one)[0] for one in draft.found if one.parameter in weights} - {""}
    if len(norms) > 1 and draft.free[norms[-1].weight]:
        *norms, last = norms
        after = draft.found[1 + max(n for n, one in enumerate(draft.found) if one.parameter == last.weight) :]
        if any(keys & atoms_of(one) for one in after if one.parameter != last.bias):
            return False
    return bool(norms) and len(blocks) < 2 and all(norm.bias and not draft.free[norm.weight] for norm in norms)


def _unsolved(draft: Draft) -> list[str]:
    """Return the spaces that are never alone on an axis, so that shapes may not determine their size."""
    alone: set[int] = set()
    for one in draft.found:
        for axis in one.axes:
            if axis is not None and not axis.top.atom.parts:
                alone.add(draft.of[id(axis.top.atom)])
    found = [n for n, place in enumerate(draft.places) if n not in alone and place.size > 1]
    order = ["head", "expert", "group", "rope", "vo", "qk"]  # first those that configurations name
    words = {n: re.sub(r"\d+$", "", draft.places[n].name) for n in found}
    found.sort(key=lambda n: order.index(words[n]) if words[n] in order else len(order))
    return [*(draft.places[n].name for n in found), *(name for name, _ in draft.kept)]


def stated_sizes(draft: Draft, key_of: Callable[[str], str | None]) -> tuple[list[tuple[str, str]], frozenset[str]]:
    """Return the sizes that shapes do not determine, as few as possible, with the config keys for them, and the spaces
    whose sizes neither shapes nor configurations give."""
    axes = [
        {leaf.space for leaf in space_leaves(axis)}
        for line in draft.lines
        for axis in parse(line.axes.rpartition("->")[2].strip())
    ]
    known = {place.name for place in draft.places if kind_of(place.moves) == "factor"}

    def solve() -> bool:
        while alone := {next(iter(rest)) for names in axes if len(rest := names - known) == 1}:
            known.update(alone)
        return all(names <= known for names in axes)

    stated = list[tuple[str, str]]()
    for name in _unsolved(draft):
        if solve():
            return stated, frozenset()
        if name not in known and (key := key_of(name)):
            known.add(name)
            stated.append((name, key))
    return stated, frozenset() if solve() else frozenset().union(*axes) - known
