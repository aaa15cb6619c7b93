# SPDX-License-Identifier: Apache-2.0
"""Axes as unknowns: the space of an axis, and the maps that may act on it, are found by unification.

Every axis begins as an unknown on which any invertible map may act. Two axes that meet in an operation become one. An
axis that is cut or flattened gets a structure. An operation that commutes only with some maps rules out the others, and
they stay ruled out. So the order of operations does not matter, and no map is allowed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from ..tables.signature import MOVES

LINEAR = MOVES["linear"]
PERMUTE = MOVES["permutation"]
_PAIRED = frozenset(move for move in LINEAR if move.startswith(("pair", "next")))


@dataclass(eq=False)
class Atom:
    """An unknown axis.

    own: the maps that may act, as in `MOVES`, not counting norms. normed: those that norms allow. link: the axis (or
    its dual) with which it was unified. parts: its structure, as a product (`flat`) or side by side. written: whether
    an operation writes it, rather than parameters only reading it. data: batch, time, pixels: no parameter has it.
    evens: the axis of which these are the entries, first those at even places; it determines what may act.
    """

    size: int
    own: frozenset[str] = LINEAR
    link: Axis | None = None
    parts: tuple[Axis, ...] = ()
    flat: bool = True
    written: bool = False
    data: bool = False
    why: list[str] = field(default_factory=list)
    normed: frozenset[str] = LINEAR
    evens: Axis | None = None

    @property
    def moves(self) -> frozenset[str]:
        return _across(self.evens.moves) if self.evens is not None else self.own & self.normed


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor: an atom, or the dual of one (read, not written)."""

    atom: Atom
    dual: bool = False

    @property
    def size(self) -> int:
        return self.atom.size

    def __invert__(self) -> Axis:
        return Axis(self.atom, not self.dual)

    @property
    def top(self) -> Axis:
        """Return the axis with which this one was unified, in the end."""
        link = self.atom.link
        if link is None:
            return self
        if link.atom.link is not None:
            self.atom.link = link = link.top  # a shorter path for the next time
        return ~link if self.dual else link

    @property
    def parts(self) -> tuple[Axis, ...]:
        top = self.top
        parts = _reduced(top.atom.parts) if top.atom.flat else top.atom.parts
        return tuple([~part for part in parts]) if top.dual else parts

    @property
    def flat(self) -> bool:
        return bool(self.top.atom.parts) and self.top.atom.flat

    @property
    def cat(self) -> bool:
        return bool(self.top.atom.parts) and not self.top.atom.flat

    @property
    def moves(self) -> frozenset[str]:
        return self.top.atom.moves

    @property
    def home(self) -> Axis:
        """Return the axis of which these are the entries, in any order."""
        top = self.top
        if top.atom.evens is None:
            return top
        home = top.atom.evens.home
        return ~home if top.dual else home

    @property
    def leaves(self) -> Iterator[Axis]:
        """Yield the parts without structure of which it consists, left to right."""
        waiting = [self]
        while waiting:
            top = waiting.pop().top
            if not top.atom.parts:
                yield top
            waiting += reversed(top.parts)


def _reduced(parts: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the parts of a product without factors that take each other back."""
    if sum(part.atom.size == 1 for part in parts) < 2:
        return parts
    kept: list[Axis] = []
    for part in parts:
        inverse = ~part.top if part.atom.size == 1 else None
        place = next((n for n, other in enumerate(kept) if other.atom.size == 1 and other.top == inverse), None)
        if place is not None:
            kept.pop(place)
        else:
            kept.append(part)
    return tuple(kept)


def new(size: int, moves: frozenset[str] = LINEAR) -> Axis:
    return Axis(Atom(size, moves))


def index(size: int) -> Axis:
    """Return an axis whose entries are only distinguished by their place."""
    return new(size, PERMUTE)


def data(size: int) -> Axis:
    axis = new(size, frozenset())
    axis.atom.data = True
    return axis


def is_data(axis: Axis | None) -> bool:
    return axis is None or all(leaf.atom.data for leaf in axis.leaves)


def flat(parts: Sequence[Axis]) -> Axis:
    """Return several axes flattened into one."""
    parts = [part for part in parts if part.size > 1 or not part.top.atom.data]
    if len(parts) == 1:
        return parts[0]
    return Axis(Atom(prod(part.size for part in parts), parts=tuple(parts)))


def joined(parts: Sequence[Axis]) -> Axis:
    """Return several axes side by side."""
    return parts[0] if len(parts) == 1 else Axis(Atom(sum(part.size for part in parts), parts=tuple(parts), flat=False))


def evens_first(axis: Axis) -> Axis:
    """Return an axis without structure, reordered: first its entries at even places, then the others."""
    return Axis(Atom(axis.size, written=axis.top.atom.written, evens=axis))


def _across(moves: frozenset[str]) -> frozenset[str]:
    """Return the moves of an axis whose pairs (2 i, 2 i + 1) are the pairs (i, i + n / 2) of an axis with these moves,
    or vice versa."""
    turned = {"pair": "next", "next": "pair"}
    return frozenset(" ".join([turned.get(words[0], words[0]), *words[1:]]) for words in map(str.split, moves))


def restrict(axis: Axis, moves: frozenset[str], why: str, *, norm: bool = False) -> None:
    """Restrict the moves of every part of an axis. norm: because a norm reads it."""
    if not moves & MOVES["factor"]:
        _take_back(axis, why)
    for leaf in axis.leaves:
        if leaf.atom.evens is not None:
            restrict(leaf.atom.evens, _across(moves), why, norm=norm)
            continue
        if leaf.moves - moves:  # first comes what left nothing, if anything did
            leaf.atom.why.insert(len(leaf.atom.why) if leaf.moves & moves else 0, why)
        if norm:
            leaf.atom.normed &= moves
        else:
            leaf.atom.own &= moves


def _take_back(axis: Axis, why: str) -> None:
    """Let two factors of the same entries take each other back, `f(s^-1 (s x)) = f(x)`, where none may act on these."""
    factors = [part.top for part in axis.parts if part.size == 1 and "scale" in part.moves] if axis.flat else []
    if len(factors) == 2 and factors[0].atom is not factors[1].atom:
        link(factors[0], ~factors[1], why)
    for part in axis.parts:
        _take_back(part, why)


def fix(axis: Axis, why: str) -> None:
    restrict(axis, frozenset(), why)


def lower(axes: Iterable[Axis | None], moves: frozenset[str], why: str) -> None:
    """Restrict the moves of all of these axes."""
    for axis in axes:
        if axis is not None:
            restrict(axis, moves, why)


def hold(axes: Iterable[Axis | None], why: str) -> None:
    """Fix all of these axes."""
    lower(axes, frozenset(), why)


def write(axes: Iterable[Axis | None]) -> None:
    """Mark these axes as written."""
    for axis in axes:
        for leaf in axis.leaves if axis is not None else ():
            leaf.atom.written = True


def link(a: Axis, b: Axis, why: str) -> None:
    """Make an axis without structure one with another axis."""
    if b.atom.parts:
        restrict(b, _of_parts(a.atom.own), why)
        restrict(b, _of_parts(a.atom.normed), why, norm=True)
    if a.atom.written:
        write([b])
    if not b.atom.parts:
        if a.moves != b.moves:
            b.atom.why = b.atom.why + a.atom.why if a.moves else a.atom.why + b.atom.why
        b.atom.own &= a.atom.own
        b.atom.normed &= a.atom.normed
        b.atom.data = a.atom.data or b.atom.data
    a.atom.link = Axis(b.atom, a.dual != b.dual)


def _of_parts(moves: frozenset[str]) -> frozenset[str]:
    """Return the moves of the parts of an axis with these moves: its pairs are not theirs."""
    if moves == LINEAR:
        return moves
    return moves - _PAIRED | (MOVES["signs"] if "sign" in moves else frozenset())


def bind(axis: Axis, sizes: Iterable[int], flattened: bool) -> None:
    """Give a structure to an axis without one. Moves of pairs are lost, others then act on the parts."""
    top = axis.top
    if top.atom.evens is not None:
        fix(top, "pairs taken apart")
        top.atom.own, top.atom.evens = frozenset(), None
    parts = [
        Axis(Atom(size, _of_parts(top.atom.own), written=top.atom.written, data=top.atom.data, why=list(top.atom.why),
                  normed=_of_parts(top.atom.normed))) for size in sizes
    ]  # fmt: skip
    top.atom.parts, top.atom.flat = tuple(parts), flattened
