# SPDX-License-Identifier: Apache-2.0
"""Axes as unknowns: the space of an axis, and the maps that may act on it, are found by unification.

Every axis begins as an unknown on which any invertible map may act. Two axes that meet in an operation become one; an
axis that is cut or flattened gets a structure; an operation that commutes only with some maps restricts those that may
act, and restrictions are never lifted. So the order of operations does not matter, and no map is allowed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
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
        return Axis(link.atom, link.dual != self.dual)

    @property
    def parts(self) -> tuple[Axis, ...]:
        top = self.top
        parts = _reduced(top.atom.parts) if top.atom.flat else top.atom.parts
        return tuple(~part for part in parts) if top.dual else parts

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
        top = self.top
        if not top.atom.parts:
            yield top
        for part in top.parts:
            yield from part.leaves


def _reduced(parts: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the parts of a product without factors that take each other back."""
    kept: list[Axis] = []
    for part in parts:
        inverse = [other.size == 1 and other.top == ~part.top for other in kept]
        if True in inverse:
            kept.pop(inverse.index(True))
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
        if leaf.moves - moves:
            leaf.atom.why.append(why)
        if norm:
            leaf.atom.normed &= moves
        else:
            leaf.atom.own &= moves


def _take_back(axis: Axis, why: str) -> None:
    """Let two factors of the same entries take each other back, `f(s^-1 (s x)) = f(x)`, where none may act on these."""
    factors = [part.top for part in axis.parts if part.size == 1 and "scale" in part.moves] if axis.flat else []
    if len(factors) == 2 and factors[0].atom is not factors[1].atom:
        unify(factors[0], ~factors[1], why)
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


def split(axis: Axis, sizes: Sequence[int], why: str = "reshape") -> list[Axis]:
    """Return the factors of an axis, row-major, of these sizes, which become its structure if it has none.

    If its structure does not allow this, it is fixed, and so are the factors.
    """
    sizes = list(sizes)
    top = axis.top
    if len(sizes) == 1:
        return [axis]
    if not top.atom.parts:
        if top.atom.data:
            return [data(size) for size in sizes]
        bind(top, sizes, True)
        return list(axis.parts)
    if top.flat:
        found: list[Axis] = []
        parts = list(top.parts)
        for number, size in enumerate(sizes):
            taken: list[Axis] = []
            while prod(part.size for part in taken) < size and parts:
                part = parts.pop(0)
                have = prod(each.size for each in taken)
                if have * part.size > size:
                    if size % have or part.size % (size // have):
                        break
                    cut = size // have
                    part, rest = split(part, [cut, part.size // cut])
                    parts.insert(0, rest)
                taken.append(part)
            if number == len(sizes) - 1:
                taken += parts  # factors of one entry
            if prod(part.size for part in taken) != size:
                break
            found.append(flat(taken) if taken else new(1, frozenset()))
        else:
            return found
    elif sizes[0] and len({part.size for part in top.parts}) == 1 and top.parts[0].size * sizes[0] == top.size:
        # [q | k | v] viewed as (3 q): only if all parts are the same
        for part in top.parts[1:]:
            unify(top.parts[0], part, why)
        return [new(sizes[0], frozenset()), *split(top.parts[0], sizes[1:], why)]
    fix(axis, why)
    return [new(size, frozenset()) for size in sizes]


def pick(axis: Axis, offset: int, dims: Sequence[tuple[int, int]], why: str) -> list[Axis] | None:
    """Return the axes of a selection: entry (i, j, ..) is entry offset + i * stride + j * stride' .. of `axis`.

    dims: (size, stride), in descending order of strides. None if the structure of the axis does not allow the
    selection.
    """
    top = axis.top
    if not dims:
        if top.size > 1:
            _at(top, offset, why)
        return []
    reach = offset + sum((size - 1) * stride for size, stride in dims)
    if reach >= top.size:
        return None
    if len(dims) == 1 and dims[0] == (top.size, 1):
        return [axis]
    if top.cat:
        start = 0
        for part in axis.parts:
            if start <= offset and reach < start + part.size:
                return pick(part, offset - start, dims, why)
            start += part.size
        if len(dims) == 1 and dims[0][1] == 1:
            return _several(axis, offset, dims[0][0])
        return None
    if top.flat:
        first, rest = axis.parts[0], axis.parts[1:]
        inner = prod(part.size for part in rest)
        if inner == 1:  # factors: every entry has its own
            found = pick(first, offset, dims, why)
            if found and prod(size for size, _ in dims) == top.size:
                return [*found[:-1], flat([found[-1], *rest])]
            for part in rest:
                fix(part, why)
            return found
        outside, inside, crossing = [], [], 0
        for size, stride in dims:
            if stride % inner == 0:
                outside.append((size, stride // inner))
            elif stride * size <= inner:
                inside.append((size, stride))
            elif inner % stride == 0 and size % (inner // stride) == 0:
                crossing = inner // stride
                outside.append((size // crossing, 1))
                inside.append((crossing, stride))
            else:
                return None
        before = pick(first, offset // inner, outside, why)
        after = pick(flat(rest), offset % inner, inside, why)
        if before is None or after is None:
            return None
        if crossing:
            before[-1:], after[:1] = [flat([before[-1], after[0]])], []
        return before + after
    size, stride = dims[0]
    if size * stride == top.size and offset < stride:
        bind(top, [size, stride], True)
        return pick(axis, offset, dims, why)
    start, length = offset // stride * stride, size * stride
    if start + length > top.size:
        start = offset  # a range that begins inside a step
        length = top.size - start
        if length < size * stride - stride + 1:
            return None
    pieces = [piece for piece in (start, length, top.size - start - length) if piece]
    if len(pieces) == 1:
        return None
    bind(top, pieces, False)
    return pick(axis, offset, dims, why)


def _several(axis: Axis, offset: int, length: int) -> list[Axis] | None:
    """Return a range over several parts that are side by side."""
    found, start = [], 0
    for part in axis.parts:
        low, high = max(offset, start), min(offset + length, start + part.size)
        if low < high:
            piece = pick(part, low - start, [(high - low, 1)], "slice")
            if piece is None:
                return None
            found += piece
        start += part.size
    return [joined(found)]


def _at(axis: Axis, place: int, why: str) -> None:
    """Fix an axis, since one of its entries is used by its number."""
    if axis.cat:
        for part in axis.parts:
            if place < part.size:
                return _at(part, place, why)
            place -= part.size
    return fix(axis, why)


def unify(a: Axis, b: Axis, why: str) -> None:
    """Make two axes one."""
    a, b = (axis.parts[0].top if axis.flat and len(axis.parts) == 1 else axis.top for axis in (a, b))
    if a.atom is b.atom:
        if a.dual != b.dual:
            restrict(a, MOVES["orthogonal"], why)
        return
    if _inside(a.atom, b) or _inside(b.atom, a):
        return _with_part(a, b, why)
    if a.size != b.size:
        return hold((a, b), why)
    if a.atom.evens is not None and b.atom.evens is not None:
        return unify(a.home, b.home, why)
    if a.atom.evens is not None or b.atom.evens is not None:  # one in another order
        return hold((a, b), why)
    if a.atom.parts and b.atom.parts:
        return _match(a, b, why)
    if a.atom.parts:
        a, b = b, a
    if b.atom.parts:
        restrict(b, _of_parts(a.atom.own), why)
        restrict(b, _of_parts(a.atom.normed), why, norm=True)
    if a.atom.written:
        write([b])
    if not b.atom.parts:
        if a.moves != b.moves:
            b.atom.why += a.atom.why
        b.atom.own &= a.atom.own
        b.atom.normed &= a.atom.normed
        b.atom.data = a.atom.data or b.atom.data
    a.atom.link = Axis(b.atom, a.dual != b.dual)


def _with_part(a: Axis, b: Axis, why: str) -> None:
    """Unify two axes one of which is a part of the other, which nothing may be beside."""
    whole, part = (a, b) if _inside(b.atom, a) else (b, a)
    beside = [one for one in whole.parts if one.top != part]
    hold(beside if whole.flat and all(one.size == 1 for one in beside) else (whole, part), why)


def _inside(atom: Atom, axis: Axis) -> bool:
    return bool(axis.atom.parts) and any(part.top.atom is atom or _inside(atom, part.top) for part in axis.parts)


def _match(a: Axis, b: Axis, why: str) -> None:
    """Unify two structures, refining the coarser one."""
    if a.flat and b.flat:
        alone = [[part for part in axis.parts if part.size == 1] for axis in (a, b)]
        bodies = [flat([part for part in axis.parts if part.size > 1]) for axis in (a, b)]
        if any(alone):  # factors, `(ffn up_scale)`
            for left, right in zip_longest(*alone):
                if left is None or right is None:
                    fix(left or right, why)
                else:
                    unify(left, right, why)
            return unify(bodies[0], bodies[1], why)
        sizes = _refined([part.size for part in a.parts], [part.size for part in b.parts])
        if sizes is not None and len(sizes) > 1:
            for left, right in zip(split(a, sizes), split(b, sizes), strict=True):
                unify(left, right, why)
            return
    elif a.cat and b.cat:
        ends = sorted({end for axis in (a, b) for end in accumulate(part.size for part in axis.parts)})
        for start, end in zip([0, *ends], ends, strict=False):
            left, right = (pick(axis, start, [(end - start, 1)], why) for axis in (a, b))
            if left is None or right is None:
                break
            unify(left[0], right[0], why)
        else:
            return
    else:  # (3 q) and [q | k | v]
        product, side = (a, b) if a.flat else (b, a)
        count = len(side.parts)
        if all(part.size == product.size // count for part in side.parts) and product.size % count == 0:
            outer, inner = split(product, [count, product.size // count])
            if outer.size == count:
                fix(outer, why)
                for part in side.parts:
                    unify(inner, part, why)
                return
    hold((a, b), why)


def _refined(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """Return the common refinement of two factorizations, or None."""
    left, right = [n for n in a if n > 1], [n for n in b if n > 1]
    found = []
    while left and right:
        small = min(left[0], right[0])
        if left[0] % small or right[0] % small:
            return None
        found.append(small)
        for side in (left, right):
            side[0] //= small
            if side[0] == 1:
                side.pop(0)
    return found if not left and not right else None


def gated(axis: Axis, why: str) -> tuple[Axis, list[Axis]]:
    """Return an axis whose entries are multiplied one by one, as (places, factors). If any factor, or any positive one,
    may act on it, it gets one, `(p s)`, of which another tensor takes the inverse."""
    top = axis.top
    if not top.atom.parts and {"scale", "permute"} <= top.moves:
        atom = top.atom
        places, factor = Axis(Atom(atom.size, PERMUTE)), Axis(Atom(1, top.moves & MOVES["factor"]))
        places.atom.written = factor.atom.written = atom.written
        atom.parts = (places, factor)
        return axis.parts[0], [axis.parts[1]]
    if top.flat:
        *outer, last = axis.parts
        if last.size == 1 and not last.top.atom.parts:
            if len(outer) > 1 and outer[-1].size > 1:
                return flat(outer), [last]
            places, factors = gated(flat(outer), why)
            return places, [*factors, last]
        for part in outer:
            restrict(part, PERMUTE, why)
        places, factors = gated(last, why)
        return flat([*outer, places]), factors
    restrict(axis, PERMUTE, why)
    return axis, []


def product(a: Axis, b: Axis, why: str) -> Axis:
    """Return the axis of an entrywise product."""
    for one, other in ((a, b), (b, a)):  # an axis without structure gets the other's
        if not one.top.atom.parts and other.flat and other.parts[-1].size > 1:
            split(one, [part.size for part in other.parts])
    (places, mine), (same, theirs) = gated(a, why), gated(b, why)
    unify(places, same, why)
    return flat([places, *mine, *theirs])


def square(axis: Axis, why: str) -> Axis:
    """Return the axis of an entrywise square: factors act twice, `(p s s)`."""
    if not axis.top.atom.parts and "scale" not in axis.moves:
        restrict(axis, MOVES["odd"], why)
        return axis
    places, factors = gated(axis, why)
    return flat([places, *factors, *factors])
