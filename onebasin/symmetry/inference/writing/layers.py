# SPDX-License-Identifier: Apache-2.0
"""Layers of a block are made alike, so that the atoms at the same place in all of them are one space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...tables.classes import Classes
from ...tables.signature import MOVES
from ..atoms import Atom, Axis, fix
from ..unification import unify
from .draft import Draft, Place
from .structures import matched, moving


class _NotLayers(Exception):
    """The modules of a block differ, so they are listed by name. heading: the block's."""

    def __init__(self, heading: str) -> None:
        self.heading = heading


Rows = dict[tuple[str, str], list[list[Axis]]]  # heading and rest of a name -> its axes, layer by layer
Homes = dict[int, tuple[str, int] | None]  # atoms -> block and layer, None for those of several


def find_spaces(draft: Draft) -> None:
    """Find the spaces, each of which has the atoms at the same place in all layers of a block."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for one in draft.found:
        heading, layer, _ = draft.parsed(one)
        if heading:
            blocks[heading].add(layer)
    draft.flattened |= {heading for heading, layers in blocks.items() if len(layers) < 2 or _chained(draft, heading)}
    changed = True
    while changed:
        try:
            changed = _make_alike(draft)
        except _NotLayers as block:
            draft.flattened.add(block.heading)
    _gather(draft)


def _make_alike(draft: Draft) -> bool:
    """Take a step towards layers of the same structure in every block. Return whether there was one to take."""
    orient(draft)
    rows = _rows(draft)
    if _restructured(draft, rows):
        return True
    homes, same = homes_of(draft), Classes[Atom]()
    return _told_apart(draft, rows, homes, same) or _united(draft, homes, same)


def _rows(draft: Draft) -> Rows:
    rows: Rows = defaultdict(list)
    shapes: dict[tuple[str, str], list[bool]] = {}
    for one in draft.found:
        heading, _, rest = draft.parsed(one)
        shape = [n > 1 for n in one.shape]
        if heading and shapes.setdefault((heading, rest), shape) != shape:
            raise _NotLayers(heading)  # but a list of modules of several kinds
        if heading and (heading, rest) not in draft.loose:
            rows[heading, rest].append(draft.axes(one))
    return rows


def _restructured(draft: Draft, rows: Rows) -> bool:
    """Give the axes of a tensor the same structure in all layers. Return whether any changed."""
    changed = False
    for row, (first, *others) in rows.items():
        for axes in others:
            alike = len(axes) == len(first)
            same_as = [matched(a, b) for a, b in zip(first, axes, strict=True)] if alike else [None]
            if None in same_as:
                _loosen(draft, row, rows[row])
                changed = True
                break
            changed = changed or False in same_as
    return changed


def _told_apart(draft: Draft, rows: Rows, homes: Homes, same: Classes[Atom]) -> bool:
    """Join atoms at the same place in several layers, which are one space.

    Return whether those of a tensor cannot be one, so that it was fixed.
    """
    for row, each in rows.items():
        lists = [[leaf for axis in axes for leaf in moving(axis)] for axes in each]
        for across in zip(*lists, strict=True):
            atoms = [leaf.top.atom for leaf in across]
            everywhere = {homes[id(atom)] is None for atom in atoms}
            apart = len(everywhere) > 1 or (True in everywhere and len(set(map(id, atoms))) > 1)
            if apart and not any(leaf.moves for leaf in across):
                if len({leaf.size for leaf in across}) > 1:
                    draft.ragged |= set(map(id, atoms))
                else:  # as the last layer of several, whose output nothing else is added to
                    for leaf in across[1:]:
                        unify(across[0], leaf, "nothing moves in any layer")
                continue
            turned = len({leaf.top.dual != draft.turned[id(leaf.top.atom)] for leaf in across}) > 1
            common = frozenset.intersection(*(leaf.moves for leaf in across))
            if apart or (turned and not common <= MOVES["orthogonal"]):
                _loosen(draft, row, each, keep=not common)
                return True
            for atom in atoms:
                same.join(atoms[0], atom)
    return False


def _united(draft: Draft, homes: Homes, same: Classes[Atom]) -> bool:
    """Make atoms of one layer that are one space in another layer one. Return whether any changed."""
    changed = False
    for members in same.all():
        of_layer: dict[tuple[str, int] | None, Atom] = {}
        for atom in members:
            home = homes[id(atom)]
            other = of_layer.setdefault(home, atom)
            if home is not None and other is not atom:
                moved = bool(other.moves or atom.moves)
                unify(Axis(other), Axis(atom), "one in another layer")
                if Axis(other).top.atom is not Axis(atom).top.atom:  # of other sizes, so they are fixed
                    draft.ragged |= {id(other), id(atom)}
                    changed = changed or moved
                else:
                    changed = True
    return changed


def _loosen(draft: Draft, row: tuple[str, str], each: Sequence[Sequence[Axis]], keep: bool = False) -> None:
    """Fix a tensor of a block in all layers, since it differs between them. keep: its structure is the same.

    Raises:
        _NotLayers: Layers that differ are to be listed by name.
    """
    if draft.by_name:
        raise _NotLayers(row[0])
    draft.loose |= set() if keep else {row}
    for axes in each:
        for axis in axes:
            fix(axis, "layers differ")
    named = {one.parameter for one in draft.found if draft.parsed(one)[::2] == row}
    draft.free |= {norm.weight: False for norm in draft.trace.norms if norm.weight in named}


def _chained(draft: Draft, heading: str) -> bool:
    """Whether a block is a chain of matrices with activations in between, one reading what another one writes."""
    places, layers = defaultdict[int, set[int]](set), set[int]()
    for one in draft.found:
        own, layer, rest = draft.parsed(one)
        if own != heading:
            continue
        if "." in rest:
            return False
        layers.add(layer)
        for number, axis in enumerate(one.axes):
            for leaf in axis.leaves if axis is not None else ():
                places[id(leaf.top.atom)].add(number)
    return max(layers) >= len(layers) and any(len(each) > 1 for each in places.values())


def homes_of(draft: Draft) -> Homes:
    """Return for each atom the block and layer to which it belongs, or None if it belongs to several."""
    homes: Homes = {}
    for one in draft.found:
        heading, layer, _ = draft.parsed(one)
        for axis in draft.axes(one):
            for leaf in axis.leaves:
                here = (heading, layer) if heading else None
                key = id(leaf.top.atom)
                homes[key] = here if homes.get(key, here) == here else None
    return homes


def _gather(draft: Draft) -> None:
    """Create a place for every class of atoms."""
    homes = homes_of(draft)
    first: dict[tuple[str, str, int], Atom] = {}
    same = Classes[Atom]()
    for one in draft.found:
        heading, _, rest = draft.parsed(one)
        loose = (heading, rest) in draft.loose
        inner = [leaf.top.atom for axis in draft.axes(one) for leaf in (axis.leaves if loose else moving(axis))]
        for axis in () if loose else draft.axes(one):
            for leaf in axis.leaves:
                same.join(leaf.top.atom, leaf.top.atom)
        for number, atom in enumerate(inner):
            alone = loose or not heading or homes[id(atom)] is None
            same.join(atom if alone else first.setdefault((heading, rest, number), atom), atom)
    for atoms in same.all():
        home = homes[id(atoms[0])]
        draft.places.append(Place([Axis(atom) for atom in atoms], home[0] if home else ""))
        for atom in atoms:
            draft.of[id(atom)] = len(draft.places) - 1


def orient(draft: Draft) -> None:
    """Orient every space such that its first tensor writes it, or a norm of which it is the output."""
    outputs = (norm.target.top for norm in draft.trace.norms if norm.target is not None and draft.free[norm.weight])
    draft.turned = {id(axis.atom): axis.dual for axis in outputs}
    for one in draft.found:
        for axis in draft.axes(one):
            for leaf in axis.leaves:
                draft.turned.setdefault(id(leaf.top.atom), leaf.top.dual)
