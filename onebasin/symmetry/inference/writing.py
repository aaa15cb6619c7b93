# SPDX-License-Identifier: Apache-2.0
"""Writing an inferred table: names for spaces, one block for all layers, lines for norms."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from math import prod

from ..tables.axes import Axis as Written
from ..tables.axes import Cat, Flat, Leaf, leaves, parse, show
from ..tables.classes import Classes
from ..tables.signature import MOVES, bias_beside, kind_of
from .atoms import LINEAR, PERMUTE, Atom, Axis, bind, fix, hold, restrict
from .trace import Gain, Normed, Trace
from .unification import split, unify


@dataclass(frozen=True)
class Style:
    """How much a table states about constants. To state less is never wrong.

    sums: constants that compensate each other in sums (`into`, `post-norm`) and under a softmax. norms: LayerNorms as
    norms. constants: spaces that pass constants on. back: LayerNorms that write back as norms.
    """

    sums: bool = True
    norms: bool = True
    constants: bool = True
    back: bool = True


STYLES = (Style(), Style(False), Style(False, constants=False), Style(False, constants=False, back=False),
          Style(False, False, False, False))  # fmt: skip


@dataclass
class Found:
    """One tensor: its name on disk, its axes, and the parameter of which it is (a part of) the value."""

    name: str
    axes: list[Axis | None]
    parameter: str
    shape: tuple[int, ...]
    tied: str = ""
    joint: int | None = None  # the dimension along which it is split in the file, with the number at `{@}` in the name


@dataclass
class Place:
    """A space of the table: its atoms in all layers."""

    atoms: list[Axis]
    heading: str = ""  # of the layers that have one each
    name: str = ""
    per: list[int] = field(default_factory=list)

    @property
    def moves(self) -> frozenset[str]:
        return frozenset.intersection(*(axis.moves for axis in self.atoms))

    @property
    def size(self) -> int:
        return self.atoms[0].size


_LAYER = re.compile(r"(.*?)\.(\d+)\.(.*)")


def left_by(norm: Normed, free: bool) -> frozenset[str]:
    """Return the moves that a norm allows in the space that it reads, if its weight can move (`free`) or not."""
    names = ("ones", "orthogonal") if free else ("permutation", "odd")
    return MOVES[names[norm.kind != "layernorm"]]


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


def _one_vector(axis: Axis) -> bool:
    """Whether this is the axis of one vector, or of several side by side in which nothing moves."""
    several = axis.cat or sum(leaf.size > 1 for leaf in axis.leaves) > 1
    return not several or not any(leaf.moves for leaf in axis.leaves)


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


class Writer:
    """Writes the results of a trace as a table."""

    def __init__(self, trace: Trace, found: Sequence[Found], prefix: str, style: Style, by_name: bool = False) -> None:
        self.trace, self.found, self.prefix, self.style = trace, list(found), prefix, style
        self.sizes: dict[str, int] = {}
        tied = [name for one in self.found if one.tied for name in (one.parameter, self._home(one).parameter)]
        self.gains = settle_gains(trace, tied, style.norms)
        self.free = settle_norms(trace.norms, self.found)
        if not style.norms:
            for norm in trace.norms:
                if norm.kind == "layernorm":
                    stays = norm.target is not None and not norm.target.moves
                    restrict(norm.source, frozenset() if stays else PERMUTE, "not written as a norm")
        order = {name: float(place) for place, name in enumerate(trace.seen)}
        for one in reversed(self.found):
            if one.tied and self._looked_up(one) and (home := self._home(one)).parameter not in trace.seen:
                order[home.parameter] = min(order[one.parameter] - 0.5, order.get(home.parameter, len(order)))
        self.found.sort(key=lambda one: order.get(one.parameter, len(order)))
        settle_factors(axis for one in self.found for axis in one.axes if axis is not None)
        self.degrees = settle_degrees(self.found)
        self.norm_of = {norm.weight: norm for norm in trace.norms}
        self.bias_of = {norm.bias: norm for norm in trace.norms if norm.bias}
        for norm in trace.norms:
            self._follow(norm)
        self.places: list[Place] = []
        self.of: dict[int, int] = {}
        self.flattened: set[str] = set()
        self.kept: list[tuple[str, bool]] = []  # fixed spaces, and whether every layer has its own
        self.here = ""
        self.by_name = by_name  # list layers that differ by name; otherwise, tensors that differ are fixed
        self.ragged: set[int] = set()  # fixed atoms whose size depends on the layer
        self.loose: set[tuple[str, str]] = set()  # fixed tensors of a block that differ between layers
        self.labels = 0  # the number of classes in the configuration
        self.unsized: frozenset[str] = frozenset()  # spaces whose sizes neither shapes nor configurations give

    def _looked_up(self, one: Found) -> bool:
        """Whether this is a table whose rows are looked up, unlike a head."""
        return (one.parameter,) in self.trace.rows

    def _home(self, one: Found) -> Found:
        """Return the tensor to which one is tied, under whose name it is stored, or itself."""
        return next((other for other in self.found if other.name == one.tied), one)

    def _follow(self, norm: Normed) -> None:
        """Put a norm in the order of tables: right after the writers of its input if it writes back, and right after an
        earlier norm of the same vectors."""
        mine = [one for one in self.found if one.parameter in (norm.weight, norm.bias) and len(one.axes) == 1]
        last = [leaf.top for leaf in norm.source.leaves if leaf.size > 1][-1:]
        first = next((each for each in self.trace.norms if each.weight == self.trace.together.get(norm.weight)), None)
        if not mine or not (last if first is None else self.free[norm.weight]):
            return
        before = self.found[: self.found.index(mine[0])]
        if first is not None:
            places = [place for place, one in enumerate(before) if one.parameter in (first.weight, first.bias)]
        elif self.free[norm.weight]:
            return
        else:
            places = [place for place, one in enumerate(before) for axis in one.axes if axis is not None
                      for leaf in axis.leaves if leaf.top == last[0]]  # fmt: skip
        if places:
            rest = [one for one in self.found if one not in mine]
            self.found = [*rest[: places[-1] + 1], *mine, *rest[places[-1] + 1 :]]

    # Layers

    def parsed(self, one: Found) -> tuple[str, int, str]:
        """Return heading, layer and rest of a name, with no heading for a tensor outside of blocks."""
        bare = one.name.removeprefix(self.prefix)
        match = _LAYER.match(bare)
        if match is None or match[1] in self.flattened or (self.prefix and bare == one.name):
            return "", 0, bare
        return match[1], int(match[2]), match[3]

    def prepare(self) -> None:
        """Find the spaces, each of which has the atoms at the same place in all layers of a block."""
        blocks: dict[str, set[int]] = defaultdict(set)
        for one in self.found:
            heading, layer, _ = self.parsed(one)
            if heading:
                blocks[heading].add(layer)
        self.flattened |= {heading for heading, layers in blocks.items() if len(layers) < 2 or self._chained(heading)}
        while (bad := self._conflict()) is not None:
            self.flattened.add(bad)
        self._gather()

    def _chained(self, heading: str) -> bool:
        """Whether a block is a chain of matrices with activations in between, one reading what another one writes."""
        places, layers = defaultdict[int, set[int]](set), set[int]()
        for one in self.found:
            own, layer, rest = self.parsed(one)
            if own != heading:
                continue
            if "." in rest:
                return False
            layers.add(layer)
            for number, axis in enumerate(one.axes):
                for leaf in axis.leaves if axis is not None else ():
                    places[id(leaf.top.atom)].add(number)
        return max(layers) >= len(layers) and any(len(each) > 1 for each in places.values())

    def _homes(self) -> dict[int, tuple[str, int] | None]:
        """Return for each atom the block and layer to which it belongs, or None if it belongs to several."""
        homes: dict[int, tuple[str, int] | None] = {}
        for one in self.found:
            heading, layer, _ = self.parsed(one)
            for axis in self._axes(one):
                for leaf in axis.leaves:
                    here = (heading, layer) if heading else None
                    key = id(leaf.top.atom)
                    homes[key] = here if homes.get(key, here) == here else None
        return homes

    def _axes(self, one: Found) -> list[Axis]:
        axes = [axis for axis in one.axes if axis is not None]
        norm = self.norm_of.get(one.parameter) or self.bias_of.get(one.parameter)
        if norm is not None and norm.target is not None and len(one.axes) == 1:
            return [norm.target, norm.source]
        return axes

    def _conflict(self) -> str | None:
        """Give all layers of a block the same structure. If layers are listed by name, return the heading of a block
        for which this is impossible."""
        while True:
            self._orient()
            homes = self._homes()
            rows: dict[tuple[str, str], list[list[Axis]]] = defaultdict(list)
            shapes: dict[tuple[str, str], list[bool]] = {}
            for one in self.found:
                heading, _, rest = self.parsed(one)
                shape = [n > 1 for n in one.shape]
                if heading and shapes.setdefault((heading, rest), shape) != shape:
                    return heading  # not layers, but a list of modules of several kinds
                if heading and (heading, rest) not in self.loose:
                    rows[heading, rest].append(self._axes(one))
            changed = False
            for row, (first, *others) in rows.items():
                for axes in others:
                    alike = len(axes) == len(first)
                    same_as = [_matched(a, b) for a, b in zip(first, axes, strict=True)] if alike else [None]
                    if None in same_as:
                        if self.by_name:
                            return row[0]
                        self._loosen(row, rows[row])
                        changed = True
                        break
                    changed = changed or False in same_as
            if changed:
                continue
            # Atoms at the same place in several layers are one space, so no layer may have two of them.
            same = Classes[Atom]()
            for row, each in rows.items():
                lists = [[leaf for axis in axes for leaf in _moving(axis)] for axes in each]
                for across in zip(*lists, strict=True):
                    atoms = [leaf.top.atom for leaf in across]
                    everywhere = {homes[id(atom)] is None for atom in atoms}
                    apart = len(everywhere) > 1 or (True in everywhere and len(set(map(id, atoms))) > 1)
                    if apart and not any(leaf.moves for leaf in across):
                        if len({leaf.size for leaf in across}) > 1:
                            self.ragged |= set(map(id, atoms))
                        else:  # as the last layer of several, whose output nothing else is added to
                            for leaf in across[1:]:
                                unify(across[0], leaf, "nothing moves in any layer")
                        continue
                    turned = len({leaf.top.dual != self.turned[id(leaf.top.atom)] for leaf in across}) > 1
                    common = frozenset.intersection(*(leaf.moves for leaf in across))
                    if apart or (turned and not common <= MOVES["orthogonal"]):
                        if self.by_name:
                            return row[0]
                        self._loosen(row, each, keep=not common)
                        changed = True
                        break
                    for atom in atoms:
                        same.join(atoms[0], atom)
                if changed:
                    break
            if changed:
                continue
            for members in same.all():
                of_layer: dict[tuple[str, int] | None, Atom] = {}
                for atom in members:
                    home = homes[id(atom)]
                    other = of_layer.setdefault(home, atom)
                    if home is not None and other is not atom:
                        moved = bool(other.moves or atom.moves)
                        unify(Axis(other), Axis(atom), "one in another layer")
                        if Axis(other).top.atom is not Axis(atom).top.atom:  # of other sizes, so they are fixed
                            self.ragged |= {id(other), id(atom)}
                            changed = changed or moved
                        else:
                            changed = True
            if not changed:
                return None

    def _loosen(self, row: tuple[str, str], each: Sequence[Sequence[Axis]], keep: bool = False) -> None:
        """Fix a tensor of a block in all layers, since it differs between them. keep: its structure is the same."""
        self.loose |= set() if keep else {row}
        for axes in each:
            for axis in axes:
                fix(axis, "layers differ")
        self.free |= {norm.weight: False for norm in self.trace.norms if norm.weight in self._named(row)}

    def _named(self, row: tuple[str, str]) -> set[str]:
        return {one.parameter for one in self.found if self.parsed(one)[::2] == row}

    def _gather(self) -> None:
        """Create a place for every class of atoms."""
        homes = self._homes()
        first: dict[tuple[str, str, int], Atom] = {}
        same = Classes[Atom]()
        for one in self.found:
            heading, _, rest = self.parsed(one)
            loose = (heading, rest) in self.loose
            inner = [leaf.top.atom for axis in self._axes(one) for leaf in (axis.leaves if loose else _moving(axis))]
            for axis in () if loose else self._axes(one):
                for leaf in axis.leaves:
                    same.join(leaf.top.atom, leaf.top.atom)
            for number, atom in enumerate(inner):
                alone = loose or not heading or homes[id(atom)] is None
                same.join(atom if alone else first.setdefault((heading, rest, number), atom), atom)
        for atoms in same.all():
            home = homes[id(atoms[0])]
            self.places.append(Place([Axis(atom) for atom in atoms], home[0] if home else ""))
            for atom in atoms:
                self.of[id(atom)] = len(self.places) - 1

    def _orient(self) -> None:
        """Orient every space such that its first tensor writes it, or a norm of which it is the output."""
        outputs = (norm.target.top for norm in self.trace.norms if norm.target is not None and self.free[norm.weight])
        self.turned = {id(axis.atom): axis.dual for axis in outputs}
        for one in self.found:
            for axis in self._axes(one):
                for leaf in axis.leaves:
                    self.turned.setdefault(id(leaf.top.atom), leaf.top.dual)

    def _queries_plain(self, place: Place, asked: Mapping[int, bool]) -> None:
        """Reverse a space if keys come first: `invisible` applies to the dual, which has to be the keys'."""
        atoms = [id(axis.atom) for axis in place.atoms]
        if any(atom in asked and asked[atom] != self.turned[atom] for atom in atoms):
            self.turned.update({atom: not self.turned[atom] for atom in atoms})

    # Batches: spaces with a map for each entry of others.

    def batches(self) -> None:
        of = self.of
        beside: dict[int, set[int]] = {}
        occurrences = [*self.trace.occurrences, *(self._axes(one) for one in self.found)]
        different = {tuple(id(axis.top.atom) for axis in axes): axes for axes in occurrences}
        for occurrence in different.values():
            for view in _views(occurrence):
                here = {of[id(leaf.top.atom)] for leaf in view if id(leaf.top.atom) in of}
                for place in here:
                    beside[place] = beside.get(place, here) & here
        apart: set[tuple[int, int]] = set()
        for kept, gone in self.trace.apart:
            apart |= {pair for a in kept for b in gone for pair in product(self._of(a), self._of(b))}
        before: dict[tuple[int, int], bool] = {}
        parts = ((one, *part) for one in self.found
                 for part in enumerate(leaf for axis in self._axes(one) for leaf in axis.leaves))  # fmt: skip
        rows = {(place, number, *self.parsed(one)[::2]) for one, number, leaf in parts for place in self._of(leaf)}
        having = Counter(place for place, *_ in rows)  # how many parts of tensors are of it, with all layers as one
        for one in self.found:
            for view in _views([axis for axis in one.axes if axis is not None]):
                first: dict[int, int] = {}
                for number, leaf in enumerate(view):
                    first.setdefault(of[id(leaf.top.atom)], number)
                for a in first:
                    for b in first:
                        before[a, b] = before.get((a, b), True) and first[a] < first[b]
        for number, space in enumerate(self.places):
            if kind_of(space.moves) == "fixed" or (having[number] == 1 and space.moves == LINEAR):
                continue  # what stands only once is free, and says nothing of what stands beside it
            found = []
            for outer in beside.get(number, ()):
                other = self.places[outer]
                if outer == number or (number, outer) in apart or not other.moves <= PERMUTE or other.size == 1:
                    continue
                if (space.heading == "" and other.heading) or not before.get((outer, number), False):
                    continue
                found.append(outer)
            space.per = sorted(found, key=lambda p: sum(before.get((q, p), False) for q in found))
        self.outer = {outer for place in self.places for outer in place.per}  # they have maps for each of their entries

    # Names.

    def name(self) -> None:
        passed = {
            id(leaf.top.atom) for axis, what in self.trace.passes if what == "passes" for leaf in list(axis.leaves)[-1:]
        }
        asked = {id(leaf.home.atom): leaf.home.dual
                 for axis, what in self.trace.passes if what == "met" for leaf in axis.leaves}  # fmt: skip
        met = asked.keys()
        used: dict[str, int] = {}

        def give(place: Place, name: str) -> None:
            used[name] = used.get(name, 0) + 1
            place.name = name if used[name] == 1 else f"{name}{used[name]}"

        targets = {id(n.target.top.atom): n for n in self.trace.norms if n.target is not None and self.free[n.weight]}
        self.properties: dict[int, list[str]] = defaultdict(list)
        self.parts: dict[int, str] = {}
        holds: dict[int, set[str]] = defaultdict(set)
        for number, place in enumerate(self.places):
            keys = {id(axis.atom) for axis in place.atoms}
            if keys & passed:
                holds[number].add("vo")
            elif keys & met and not place.moves <= PERMUTE | MOVES["factor"]:
                holds[number].add("qk")
        attention = {outer for number in holds for outer in self.places[number].per}
        around: set[int] = set()  # spaces on one axis with heads
        for one in self.found:
            for axis in one.axes:
                numbers = self._of(axis) if axis is not None and axis.flat else set()
                if numbers & attention:
                    around |= numbers
        count: dict[int, int] = defaultdict(int)
        first: dict[int, int] = {}  # space -> the first tensor that has it
        for i, one in enumerate(self.found):
            for axis in self._axes(one):
                for leaf in axis.leaves:
                    number = self.of[id(leaf.top.atom)]
                    count[number] += 1
                    first.setdefault(number, i)
        for number, place in sorted(
            enumerate(self.places), key=lambda each: (bool(each[1].heading), first.get(each[0], 0))
        ):
            norm = next((targets[id(axis.atom)] for axis in place.atoms if id(axis.atom) in targets), None)
            kind = kind_of(place.moves)
            part = ""
            if norm is not None:
                give(place, self._target(norm.weight))
            elif kind == "factor":
                give(place, "scale")
                part = "ffn"
            elif number in holds and kind != "permutation":
                word = "vo" if "vo" in holds[number] else {"rotary": "rope", "interleaved": "rope"}.get(kind, "qk")
                give(place, word)
                part = "attention"
                if word == "vo" and kind == "linear":
                    self.properties[number].append("passes")
                if word == "qk" and kind == "linear":
                    self.properties[number].append("invisible")
                    self._queries_plain(place, asked)
            elif number in attention:
                give(place, "group" if any(outer in attention for outer in place.per) else "head")
                part = "attention"
            elif number in around and kind == "permutation":
                give(place, "group")
                part = "attention"
            elif number in self.outer and kind == "permutation":
                deeper = any(number in other.per and other.moves <= PERMUTE for other in self.places)
                give(place, "expert" if deeper else "ffn")
                part = "ffn"
            elif kind == "fixed":
                why = {reason for axis in place.atoms for reason in axis.atom.why}
                labels = "output" in why and self._counts_labels(place)
                give(place, "label" if labels else "vocab" if "token ids" in why or "output" in why else "fixed")
            elif not place.heading and count[number] > 3:
                give(place, "stream")
                part = "stream"
            elif kind in ("permutation", "relu", "odd"):
                give(place, "ffn" if place.heading else "inner")
                part = "ffn" if place.heading else "head"
            else:
                give(place, "inner" if not place.heading else "rank")
                part = "attention" if place.heading else "head"
            self.parts[number] = part

    def _counts_labels(self, place: Place) -> bool:
        """Whether the size of a space is the number of classes, and only tensors of a head have it."""
        keys = {id(axis.atom) for axis in place.atoms}
        having = [one.name for one in self.found if keys & self._touched(one)]
        return place.size == self.labels and bool(self.prefix) and not any(
            name.startswith(self.prefix) for name in having)  # fmt: skip

    def _in_some_layers(
        self, place: Place, list_of: Callable[[Sequence[str]], tuple[str, Sequence[str]] | None]
    ) -> Iterator[tuple[str, str]]:
        """Yield the other kinds of a space in some layers, with conditions on a list of the configuration."""
        homes = self._homes()
        layers: dict[int, list[Axis]] = defaultdict(list)
        for axis in place.atoms:
            if (home := homes.get(id(axis.atom))) is not None:
                layers[home[1]].append(axis)
        if not place.heading or set(layers) != set(range(len(layers))) or kind_of(place.moves) == "fixed":
            return
        kinds = [self._declared(Place(layers[number], place.heading)) for number in range(len(layers))]
        if len(set(kinds)) > 1 and (listed := list_of(kinds)) is not None:
            named = dict(zip(listed[1], kinds, strict=True))
            yield from ((kind, f"{listed[0]}[layer]={item}") for item, kind in named.items()
                        if kind != self._declared(place))  # fmt: skip

    def _declared(self, place: Place) -> str:
        """Return the kind of a space without the restrictions by norms, if their lines in the table imply these."""
        if re.fullmatch(r"label\d*", place.name):
            return "labels"
        keys = {id(axis.atom) for axis in place.atoms}
        left = [left_by(norm, self.free[norm.weight]) for norm in self.trace.norms if self._written(norm)
                and keys & {id(leaf.top.atom) for leaf in norm.source.leaves}]  # fmt: skip
        own = frozenset.intersection(*(axis.top.atom.own for axis in place.atoms))
        implied = kind_of(own.intersection(*left)) == kind_of(place.moves)
        return kind_of(own if implied else place.moves)

    def _begins_anew(self, place: Place) -> bool:
        """Whether all norms of a stream, or all but a last one, write back into it, have biases, and follow each other,
        unlike those of an encoder, whose output a decoder reads in all layers."""
        keys = {id(axis.atom) for axis in place.atoms}
        norms = [] if place.heading else [n for n in self.trace.norms if id(n.source.top.atom) in keys]
        weights = {norm.weight for norm in norms}
        blocks = {self.parsed(one)[0] for one in self.found if one.parameter in weights} - {""}
        if len(norms) > 1 and self.free[norms[-1].weight]:
            *norms, last = norms
            after = self.found[1 + max(n for n, one in enumerate(self.found) if one.parameter == last.weight) :]
            if any(keys & self._touched(one) for one in after if one.parameter != last.bias):
                return False
        return bool(norms) and len(blocks) < 2 and all(norm.bias and not self.free[norm.weight] for norm in norms)

    def _touched(self, one: Found) -> set[int]:
        return {id(leaf.top.atom) for axis in one.axes if axis is not None for leaf in axis.leaves}

    def _runs_again(self, weight: str) -> bool:
        """Whether an earlier norm runs after this one, because layers run again on its output."""
        order = {norm.weight: place for place, norm in enumerate(self.trace.norms)}
        source = {norm.weight: norm.source.top for norm in self.trace.norms}
        taken = [other for other in self.trace.normed if not other or source[other] == source[weight]]
        return any(one == weight and other and order[other] <= order[one] for one, other in pairwise(taken))

    def _written(self, norm: Normed) -> bool:
        """Whether a norm is written as such."""
        if norm.kind == "layernorm" and not (self.style.norms if self.free[norm.weight] else self.style.back):
            return False
        return self.free[norm.weight] or not norm.source.cat

    def _target(self, weight: str) -> str:
        words = [word for word in weight.split(".")[:-1] if not word.isdigit()]
        return re.sub(r"\W", "_", words[-1] if words else "normed") + "_out"

    # Text.

    def axis(self, axis: Axis | None) -> Written:
        if axis is None:
            return Leaf("1")
        if axis.top.atom.parts and self._still(axis):
            return Leaf(self._kept(axis.size))
        if axis.flat:
            inner = [part for part in _pieces(axis) if part.size > 1 or not self._still(part)]
            return self.axis(inner[0]) if len(inner) == 1 else Flat(tuple(map(self.axis, inner)))
        if axis.cat:
            parts: list[Written] = []
            still = 0
            for part in [*_pieces(axis), None]:
                if part is not None and self._still(part) and not self._normed(part):
                    still += part.size
                    continue
                if still:
                    parts.append(Leaf(self._kept(still)))
                    still = 0
                if part is not None:
                    written = self.axis(part)
                    parts += written.parts if isinstance(written, Cat) else [written]
            return Cat(tuple(parts))
        if self.here and id(axis.top.atom) in self.ragged:
            return Leaf(self._kept(axis.size))
        if not axis.size:  # empty
            return Leaf("0")
        place = self.places[self.of[id(axis.top.atom)]]
        outer = self.of[id(axis.top.atom)] in self.outer
        if kind_of(place.moves) == "fixed" and place.size in (1, 2, 3) and not outer and not self._alone(axis):
            return Leaf(str(place.size))
        return Leaf(place.name, axis.top.dual != self.turned[id(axis.top.atom)] and not outer)

    def _still(self, axis: Axis) -> bool:
        """Whether all parts of an axis are fixed, and no space has a map for each of their entries."""
        numbers = self._of(axis)
        return all(kind_of(self.places[n].moves) == "fixed" and n not in self.outer for n in numbers)

    def _normed(self, axis: Axis) -> bool:
        """Whether a norm reads an axis, so that the table has to name it (queries or keys where nothing moves)."""
        return any(self._written(norm) and norm.source.top.atom is axis.top.atom for norm in self.trace.norms)

    def _kept(self, size: int) -> str:
        """Return the name of a new fixed space."""
        name = f"kept{len(self.kept) + 1}"
        self.kept.append((name, bool(self.here)))
        self.sizes[name] = size
        return name

    def _alone(self, axis: Axis) -> bool:
        return any(axis.top.atom is other.top.atom for one in self.found for other in one.axes if other is not None)

    def lines(self) -> Iterator[tuple[int, str, str, str, str, bool]]:
        """Yield (order, heading, name, axes, notes, head)."""
        done: set[tuple[str, str]] = set()
        layers: dict[str, set[int]] = defaultdict(set)
        present: dict[tuple[str, str], int] = defaultdict(int)
        for one in self.found:
            heading, layer, rest = self.parsed(one)
            if heading:
                layers[heading].add(layer)
                present[heading, rest] += 1
        padded = {place for axis in self.trace.padded for place in self._of(axis)}
        for place, one in enumerate(self.found):
            heading, _, rest = self.parsed(one)
            if (heading, rest) in done:
                continue
            done.add((heading, rest))
            self.here = heading
            optional = "??" if heading and present[heading, rest] < len(layers[heading]) else ""
            notes = " ; ".join(self._notes(one))
            head = bool(self.prefix) and not one.name.startswith(self.prefix)
            read = one.parameter in self.trace.seen
            head = head or (bool(one.tied) and read and not self._looked_up(one))
            norm, bias = self.norm_of.get(one.parameter), self.bias_of.get(one.parameter)
            if (heading, rest) in self.loose:
                text = show(tuple(Leaf(self._kept(n) if n > 1 else "1") for n in one.shape))
                yield place, heading, rest + optional, text, notes, head
                continue
            if norm is not None and len(one.axes) == 1 and (self.style.norms or norm.kind != "layernorm"):
                text = self._norm(norm)
            elif bias is not None and len(one.axes) == 1:
                assert bias.target is not None
                text = show((self._primal(self.axis(bias.target)),)) if self.free[bias.weight] else show(
                    (self._primal(self.axis(bias.source)),))  # fmt: skip
                if self._of(bias.target) & padded:
                    notes = " ; ".join(filter(None, [notes, "padded"]))
            elif norm is not None and len(one.axes) == 1:
                text = show((self._primal(self.axis(norm.source)),))
            else:
                axes = tuple(self.axis(axis) if axis is not None or n == 1 else Leaf(self._kept(n))
                             for axis, n in zip(one.axes, one.shape, strict=True))  # fmt: skip
                text = show(axes)
                if one.joint is not None:
                    rest = rest.replace("@", next(leaf.space for leaf in leaves(axes[one.joint]) if not leaf.constant))
            yield (
                place,
                heading,
                rest + (optional or ("?" if head or one.tied else "")),
                text,
                notes,
                head,
            )

    def _notes(self, one: Found) -> Iterator[str]:
        """Yield the notes of a tensor, except those that its axes imply."""
        if one.tied:
            yield f"tied {one.tied.removeprefix(self.prefix)}"
        if copies := self._copies(one):
            yield f"beside {' '.join(copy.name.removeprefix(self.prefix) for copy in copies)}"
        matrix = next((other for other in self.found if other.parameter == self.trace.biases.get(one.parameter)), None)
        if matrix is not None and self._biases(one, matrix):
            yield f"biases {matrix.name.removeprefix(self.prefix)}"
        if (gain := self.gains.get(one.parameter)) is not None:
            yield f"scales {' '.join(self.parsed(other)[2] for other in self.found if other.parameter in gain.of)}"
        if self.style.norms and (raised := self._raised(one)) is not None:
            yield raised
        if self.style.sums and one.parameter in self.trace.softmaxed:
            yield "softmax"
        norm = self.bias_of.get(one.parameter)
        if self.style.sums and norm is not None and not self.free[norm.weight] and self._runs_again(norm.weight):
            yield "stays"
        if self.style.sums and (places := self._placed(one)) is not None:
            rows, rest = (" ".join(other.name.removeprefix(self.prefix) for other in some) for some in places)
            yield from ([f"rows {rows}"] if rows else [])
            yield f"into {rest}".rstrip()
        elif self.style.sums and (home := self._summed_with(one)) is not None:
            yield f"into {home.name.removeprefix(self.prefix)}"

    def _raised(self, one: Found) -> str | None:
        """Return the note of a matrix whose rows may have factors that another one in its block compensates."""
        if one.name not in self.degrees:
            return None
        power, reader = self.degrees[one.name]
        rest = self.parsed(reader)[2]
        if reader.joint is not None:
            pieces = reader.axes[reader.joint]
            if pieces is None or self._still(pieces):
                return None
            rest = rest.replace("@", next(leaf.space for leaf in leaves(self.axis(pieces)) if not leaf.constant))
        return f"degree {power} {rest}" if self.parsed(one)[:2] == self.parsed(reader)[:2] else None

    def _placed(self, one: Found) -> tuple[list[Found], list[Found]] | None:
        """Return the tensors that absorb the first rows of a table of positions, and those that absorb the mean of the
        others."""
        once = self.trace.uses["", one.parameter] == 1 and not one.tied and not self.parsed(one)[0]
        *first, (_, shared) = self.trace.placed.get(one.parameter, ((0, ()),))
        vectors = [[other for other in self.found if other.parameter in names] for names in (
            *(names for _, names in first), shared)]  # fmt: skip
        alone = all([prod(other.shape[:-1]) for other in found] == [length]
                    for (length, _), found in zip(first, vectors, strict=False))  # fmt: skip
        return ([each[0] for each in vectors[:-1]], vectors[-1]) if once and alone and any(vectors) else None

    def _biases(self, one: Found, matrix: Found) -> bool:
        """Whether a vector is the bias of a matrix under an unrelated name."""
        alone = sum(n > 1 for n in one.shape) == 1 and not one.tied
        return alone and one.name != bias_beside(matrix.name) and matrix.name.endswith("weight")

    def _copies(self, one: Found) -> list[Found]:
        """Return tensors that a file may omit since they are tied to this one, without a sign that they exist: tables
        that are looked up, and heads whose inputs others read as well."""
        return [other for other in self.found
                if other.tied == one.name and (self._looked_up(other) or self._read_by_others(other))]  # fmt: skip

    def _read_by_others(self, one: Found) -> bool:
        """Whether other tensors read all spaces that this one reads."""
        read = [leaf.top for axis in one.axes if axis is not None for leaf in axis.leaves
                if leaf.top.dual != self.turned[id(leaf.top.atom)]]  # fmt: skip
        others = [leaf.top for other in self.found if other.tied != one.tied
                  for axis in other.axes if axis is not None for leaf in axis.leaves]  # fmt: skip
        return bool(read) and all(leaf in others for leaf in read)

    def _summed_with(self, one: Found) -> Found | None:
        """Return the first of the tables that are summed with this one whenever its rows are looked up."""
        known = self.trace.rows
        rows = max((each for each in known if one.parameter in each), key=len, default=())
        if len({known[rows], *(known[name,] for name in rows)}) > 1:
            return None
        first = next((other for other in self.found if other.parameter in rows), one)
        if first is one or one.tied:
            return None
        home = self._home(first)
        return first if first in self._copies(home) else home

    def _of(self, axis: Axis) -> set[int]:
        """Return the spaces on an axis."""
        return {self.of[id(leaf.top.atom)] for leaf in axis.leaves if id(leaf.top.atom) in self.of}

    def _primal(self, axis: Written) -> Written:
        if isinstance(axis, Leaf):
            return Leaf(axis.space)
        return type(axis)(tuple(map(self._primal, axis.parts)))

    def _norm(self, norm: Normed) -> str:
        source = show((self._primal(self.axis(norm.source)),))
        kind = f"{norm.kind}1p" if norm.plus else norm.kind
        if self.free[norm.weight] and norm.target is not None:
            return f"{kind}: {source} -> {show((self._primal(self.axis(norm.target)),))}"
        return f"{kind}: {source} -> {source}" if self._written(norm) else source

    def spaces(self) -> list[tuple[int, str, str, str, str, bool]]:
        """Find and name the spaces, and return the lines."""
        if not self.places:
            self.prepare()
            self._orient()
            self.batches()
            self.name()
            self.sizes |= {place.name: place.size for place in self.places}
            self.written = list(self.lines())
        return self.written

    def text(
        self,
        family: str,
        types: Sequence[str],
        key_of: Callable[[str], str | None],
        list_of: Callable[[Sequence[str]], tuple[str, Sequence[str]] | None],
        ignored: Sequence[str],
    ) -> str:
        """Return the table.

        key_of: name of a space -> the expression for its size in configurations. list_of: the kinds of all layers ->
        the list of a configuration whose items distinguish these, and the items. ignored: patterns of buffers.
        """
        lines = self.spaces()
        needed = self._unsolved()
        out = [f"family {family}", f"types {' '.join(types)}"]
        if self.prefix:
            out.append(f"prefix {self.prefix}")
        out += [f"size {name} = {key}" for name, key in self._sizes(needed, key_of, [line[3] for line in lines])]
        out += [f"ignore {' '.join(ignored)}"] if ignored else []
        out += ["", "spaces"]
        used = set(re.findall(r"[A-Za-z_]\w*", " ".join(line[3] for line in lines)))
        targets = {id(n.target.top.atom) for n in self.trace.norms if n.target is not None and self.free[n.weight]
                   and (self.style.norms or n.kind != "layernorm") and n.target.moves}  # fmt: skip
        for number, place in enumerate(self.places):
            if place.name not in used or any(id(axis.atom) in targets for axis in place.atoms):
                continue
            per = (["layer"] if place.heading else []) + [self.places[outer].name for outer in place.per]
            properties = self.properties[number] if self.style.constants else []
            if self.style.sums and self._begins_anew(place):
                properties = [*properties, "post-norm"]
            after = [self.parts[number], *([f"per {', '.join(per)}"] if per else []), *properties]
            out.append(" ".join(["   ", place.name, self._declared(place), *after]))
            out += [" ".join(["   ", place.name, kind, *after, f"; when {asked}"])
                    for kind, asked in self._in_some_layers(place, list_of)]  # fmt: skip
        out += [f"    {name} fixed{' per layer' if layer else ''}" for name, layer in self.kept]
        section = None
        first: dict[str, int] = {}
        for at, heading, *_ in lines:
            if heading:
                first.setdefault(heading, at)
        rank = self._ranks()
        ordered = sorted(lines, key=lambda line: (line[5], first.get(line[1], line[0]), rank.get(line[0], line[0])))
        for _, heading, name, text, notes, head in ordered:
            here = "heads" if head and not heading else f"layer {heading}.{{}}" if heading else "tensors"
            if here != section:
                out += ["", here]
                section = here
            if here == "heads" and any(one.name == self.prefix + name.rstrip("?") for one in self.found):
                name = self.prefix + name
            out.append(f"    {name}  {text}" + (f"  ; {notes}" if notes else ""))
        seen = {self.parsed(one)[::2] for one in self.found if one.parameter in self.trace.seen}
        seen |= {self.parsed(self._home(one))[::2] for one in self.found if self._looked_up(one)}
        unused: dict[str, list[str]] = defaultdict(list)
        for heading, _, rest in map(self.parsed, self.found):
            if (heading, rest) not in seen and "@" not in rest and rest not in unused[heading]:
                unused[heading].append(rest)
        for heading, names in unused.items():
            out += ["", f"audit {heading}.{{}}" if heading else "audit"] if names else []
            out += [f"    {name}  unused" for name in names]
        return "\n".join(out) + "\n"

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each tensor in its block, by the place of its first occurrence: an order that is valid for
        all layers, whichever of the tensors they have."""
        merged: dict[str, list[str]] = defaultdict(list)
        after: dict[tuple[str, int], int] = {}
        first: dict[tuple[str, str], int] = {}
        for place, one in enumerate(self.found):
            heading, layer, rest = self.parsed(one)
            if not heading:
                continue
            order, at = merged[heading], after.get((heading, layer), 0)
            if (heading, rest) not in first:
                first[heading, rest] = place
                order.insert(at, rest)
                after[heading, layer] = at + 1
            else:
                after[heading, layer] = max(at, order.index(rest) + 1)
        return {first[heading, rest]: rank for heading, order in merged.items() for rank, rest in enumerate(order)}

    def _sizes(
        self, needed: Sequence[str], key_of: Callable[[str], str | None], texts: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield the sizes that shapes do not determine, as few as possible, with the config keys for them."""
        axes = [
            {leaf.space for leaf in leaves(axis) if not leaf.constant}
            for text in texts
            for axis in parse(text.rpartition("->")[2].strip())
        ]
        known = {place.name for place in self.places if kind_of(place.moves) == "factor"}

        def solve() -> bool:
            while alone := {next(iter(rest)) for names in axes if len(rest := names - known) == 1}:
                known.update(alone)
            return all(names <= known for names in axes)

        for name in needed:
            if solve():
                return
            if name not in known and (key := key_of(name)):
                known.add(name)
                yield name, key
        if not solve():
            self.unsized = frozenset().union(*axes) - known

    def hold(self, names: Collection[str]) -> None:
        """Fix these spaces."""
        for place in self.places:
            if place.name in names:
                for axis in place.atoms:
                    fix(axis, "its size is not told")

    def _unsolved(self) -> list[str]:
        """Return the spaces that are never alone on an axis, so that shapes may not determine their size."""
        alone: set[int] = set()
        for one in self.found:
            for axis in one.axes:
                if axis is not None and not axis.top.atom.parts:
                    alone.add(self.of[id(axis.top.atom)])
        found = [n for n, place in enumerate(self.places) if n not in alone and place.size > 1]
        order = ["head", "expert", "group", "rope", "vo", "qk"]  # first those that configurations name
        words = {n: re.sub(r"\d+$", "", self.places[n].name) for n in found}
        found.sort(key=lambda n: order.index(words[n]) if words[n] in order else len(order))
        return [*(self.places[n].name for n in found), *(name for name, _ in self.kept)]


def _pieces(axis: Axis) -> Iterator[Axis]:
    """Yield the parts of a product, or of a concatenation, after flattening nested ones."""
    for part in axis.parts:
        if part.top.atom.parts and part.flat == axis.flat:
            yield from _pieces(part)
        else:
            yield part


def _views(axes: Sequence[Axis]) -> Iterator[list[Axis]]:
    """Yield the combinations of axes in a tensor: concatenated parts of one axis are in different ones."""
    parts = [list(_views_of(axis)) for axis in axes]
    return (list(chain.from_iterable(view)) for view in product(*parts))


def _views_of(axis: Axis) -> Iterator[list[Axis]]:
    if axis.flat:
        yield from _views(axis.parts)
    elif axis.cat:
        for part in axis.parts:
            yield from _views_of(part)
    else:
        yield [axis.top]


def _moving(axis: Axis) -> Iterator[Axis]:
    """Yield the leaves of an axis, without fixed factors."""
    return (leaf for leaf in axis.leaves if leaf.size > 1 or leaf.moves)


def _matched(a: Axis, b: Axis) -> bool | None:
    """Give two axes the same structure: True if they have it, False if one was changed, None if it is impossible."""
    for one, other in ((a, b), (b, a)):
        if not other.top.atom.parts and other.size > 1 and not any(True for _ in _moving(one)):  # cut into entries
            one.top.atom.parts, one.top.atom.own = (), frozenset()
            return False
    x, y = ([part for part in _pieces(axis) if part.size > 1 or part.moves] for axis in (a, b))
    counts = [sum(part.size == 1 for part in parts) for parts in (x, y)]
    if a.flat and b.flat and counts[0] != counts[1]:  # one has more factors than the other
        for part in (*x, *y):
            if part.size == 1:
                fix(part, "layers differ")
        return False
    if len(x) == 1 or len(y) == 1:  # next to fixed factors
        return _matched(x[0] if len(x) == 1 else a, y[0] if len(y) == 1 else b)
    if not x and not y:
        return True if a.size == b.size or not (a.moves or b.moves) else None
    if not x or not y:
        plain, other = (a, b) if not x else (b, a)
        sizes = [part.size for part in (y or x)]
        if plain.size != other.size or plain.top.atom.data or plain.top.atom.parts:
            return None
        if other.flat:
            split(plain, sizes)
        else:
            bind(plain.top, sizes, False)
        return False
    if a.flat != b.flat or len(x) != len(y):
        return None
    results = [_matched(p, q) for p, q in zip(x, y, strict=True)]
    return None if None in results else all(results)
