# SPDX-License-Identifier: Apache-2.0
"""The state of a table in the making, and the choice of what it states."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from ..atoms import Axis
from ..trace import Gain, Normed, Trace


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
    """A space of the table: its atoms in all layers.

    heading: of the layers that have one each. part: of the model, as tables name it. per: the spaces for each entry of
    which it has a map. properties: what it does with constants.
    """

    atoms: list[Axis]
    heading: str = ""
    name: str = ""
    part: str = ""
    per: list[int] = field(default_factory=list)
    properties: list[str] = field(default_factory=list)

    @property
    def moves(self) -> frozenset[str]:
        return frozenset.intersection(*(axis.moves for axis in self.atoms))

    @property
    def size(self) -> int:
        return self.atoms[0].size


@dataclass(frozen=True)
class Line:
    """A tensor in the table. order: its place among the tensors, in which twins may differ. head: outside of the
    prefix."""

    order: int = field(compare=False)
    heading: str
    name: str
    axes: str
    notes: str
    head: bool


_LAYER = re.compile(r"(.*?)\.(\d+)\.(.*)")


@dataclass
class Draft:
    """A table in the making; each step adds what it finds.

    by_name: list layers that differ by name; otherwise, tensors that differ are fixed. labels: the number of classes in
    the configuration. free: weight of a norm -> whether it has an output space of its own. degrees: see
    `settle_degrees`. flattened: blocks whose layers are listed by name. loose: fixed tensors of a block that differ
    between layers. ragged: fixed atoms whose size depends on the layer. turned: atoms -> whether the first tensor reads
    them. of: atoms -> places. outer: places with a map for each of their entries. kept: fixed spaces without a place,
    and whether every layer has its own.
    """

    trace: Trace
    found: list[Found]
    prefix: str
    style: Style
    by_name: bool = False
    labels: int = 0
    gains: dict[str, Gain] = field(default_factory=dict)
    free: dict[str, bool] = field(default_factory=dict)
    degrees: dict[str, tuple[int, Found]] = field(default_factory=dict)
    flattened: set[str] = field(default_factory=set)
    loose: set[tuple[str, str]] = field(default_factory=set)
    ragged: set[int] = field(default_factory=set)
    turned: dict[int, bool] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    of: dict[int, int] = field(default_factory=dict)
    outer: set[int] = field(default_factory=set)
    kept: list[tuple[str, bool]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @cached_property
    def norm_of(self) -> dict[str, Normed]:
        return {norm.weight: norm for norm in self.trace.norms}

    @cached_property
    def bias_of(self) -> dict[str, Normed]:
        return {norm.bias: norm for norm in self.trace.norms if norm.bias}

    @cached_property
    def written_norms(self) -> list[tuple[Normed, set[int]]]:
        """Return the norms that the table writes as such, with the atoms that they read; final once these are."""
        written = filter(self.is_written, self.trace.norms)
        return [(norm, {id(leaf.top.atom) for leaf in norm.source.leaves}) for norm in written]

    def bare(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def parsed(self, one: Found) -> tuple[str, int, str]:
        """Return heading, layer and rest of a name, with no heading for a tensor outside of blocks."""
        bare = self.bare(one.name)
        match = _LAYER.match(bare)
        if match is None or match[1] in self.flattened or (self.prefix and bare == one.name):
            return "", 0, bare
        return match[1], int(match[2]), match[3]

    def axes(self, one: Found) -> list[Axis]:
        """Return the axes of a tensor; those of a norm are its output and its input."""
        axes = [axis for axis in one.axes if axis is not None]
        norm = self.norm_of.get(one.parameter) or self.bias_of.get(one.parameter)
        if norm is not None and norm.target is not None and len(one.axes) == 1:
            return [norm.target, norm.source]
        return axes

    def spaces_on(self, axis: Axis) -> set[int]:
        return {self.of[id(leaf.top.atom)] for leaf in axis.leaves if id(leaf.top.atom) in self.of}

    def parameters(self, space: str) -> list[str]:
        """Return the parameters on whose axes the table writes a space."""
        return [self.found[line.order].parameter for line in self.lines if space in re.findall(r"\w+", line.axes)]

    def original(self, one: Found) -> Found:
        """Return the tensor to which one is tied, under whose name it is stored, or itself."""
        return next((other for other in self.found if other.name == one.tied), one)

    def looked_up(self, one: Found) -> bool:
        """Whether this is a table whose rows are looked up, unlike a head."""
        return (one.parameter,) in self.trace.rows

    def is_written(self, norm: Normed) -> bool:
        """Whether a norm is written as such."""
        if norm.kind == "layernorm" and not (self.style.norms if self.free[norm.weight] else self.style.back):
            return False
        return self.free[norm.weight] or not norm.source.cat


def atoms_of(one: Found) -> set[int]:
    return {id(leaf.top.atom) for axis in one.axes if axis is not None for leaf in axis.leaves}
