# SPDX-License-Identifier: Apache-2.0
"""Family tables: the text that assigns spaces to the axes of a model.

A table has a header, a list of spaces, and one line per tensor, in the order of execution, which shows the norms that a
tensor's output enters. The notation, with every word that is read here, is described in docs/notation.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .axes import Axis, Flat, Leaf, leaves, nesting, parse, show, space_leaves
from .conditions import Condition, TableError, condition
from .signature import MOVES, Norm

When = tuple[Condition, ...]  # all of them must hold

HEADINGS = ("family", "types", "prefix", "include", "layers", "size", "temperature", "eps", "ignore", "still", "refuse")
SECTIONS = ("spaces", "tensors", "layer", "heads", "audit")
NOTES = ("tied", "beside", "biases", "bare", "nonlinear", "scales", "degree", "softmax", "into", "rows", "padded",
         "against", "glu", "passes", "invisible", "stays")  # fmt: skip
AUDITED = ("unused", "chooses", "constant", "idle", "unscaled", "batch")  # notes that only the audit uses
PROPERTIES = ("passes", "invisible", "post-norm")  # of a space
NORMS = ("layernorm1p", "layernorm", "rmsnorm1p", "rmsnorm")


@dataclass(frozen=True)
class Declared:
    """A space as a table declares it.

    per: `layer` or `stage`, and the spaces for each of whose entries it has its own map. other: declarations for when
    their conditions hold, of which the last counts.
    """

    kind: str
    part: str = ""
    per: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    other: tuple[tuple[When, Declared], ...] = ()


@dataclass(frozen=True)
class Note:
    word: str
    text: str
    when: When = ()


@dataclass(frozen=True)
class Line:
    """One tensor line. `heading` is the pattern of the enclosing `layer` block, or empty.

    notes: of `clauses` for a config, filled in by `resolve`.
    """

    pattern: str
    optional: bool
    axes: tuple[Axis, ...]
    norm: Norm | None  # with the names of spaces in the table
    clauses: tuple[Note, ...]
    when: When
    heading: str
    head: bool
    absolute: bool = False  # its name is given in full
    scattered: bool = False  # in some layers, and not in others
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def full(self) -> str:
        return f"{self.heading}.{self.pattern}" if self.heading else self.pattern


def spelled(pattern: str) -> str:
    """Return the first of several spellings, `{a|b}`; an index such as `{expert}` is kept."""
    return re.sub(r"\{([^}|]*)\|[^}]*\}", r"\1", pattern) if "|" in pattern else pattern


@dataclass
class Table:
    """The contents of a table.

    same: (a space, the space that replaces it, the conditions for that). names: of all lines, in full.
    """

    family: str = ""
    types: list[str] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    layers: list[list[str]] = field(default_factory=list)
    sizes: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # a condition, and the reason
    included: str = ""
    temperature: tuple[str, ...] = ()
    eps: str = ""
    spaces: dict[str, Declared] = field(default_factory=dict)
    same: list[tuple[str, str, When]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    names: frozenset[str] = frozenset()


def read_table(text: str, origin: str = "table", named: Callable[[str], Table] | None = None) -> Table:
    """Parse a table.

    Args:
        text: The table.
        origin: Its name, for messages.
        named: Returns the tables that it may include, by name.

    Raises:
        TableError: A line cannot be read.
    """
    table = Table()
    section, heading = "", ""
    blocks = [_Block()]
    for number, line, opens in _lines(text):
        word, _, rest = (piece.strip() for piece in line.strip().partition(" "))
        indent = len(line) - len(line.lstrip())
        try:
            if not indent and word in SECTIONS:
                section = "tensors" if word == "layer" else word
                heading, _, notes = (piece.strip() for piece in rest.partition(";"))
                blocks = [_Block().within(notes)]
                continue
            if not indent:
                _header(table, word, rest)
                continue
            last = None
            while len(blocks) > 1 and blocks[-1].indent >= indent:
                last = blocks.pop()
            if opens and word != "otherwise" and word not in ("when", *NOTES):
                raise TableError(f"'{word}' has indented lines below it, as only 'when', 'otherwise' and notes may")
            if opens:
                inner = blocks[-1].beside(last) if word == "otherwise" else blocks[-1].within(line)
                blocks.append(replace(inner, indent=indent))
            elif section == "spaces":
                _space(table, line, blocks[-1])
            elif section == "audit":
                _audited(table, f"{heading}.{word}" if heading else word, blocks[-1].within(rest))
            elif section:
                table.lines += _tensors(word, rest, heading, blocks[-1], section == "heads")
            else:
                raise TableError("an indented line before 'spaces' or 'tensors'")
        except ValueError as error:
            raise TableError(f"{origin}, line {number}: {error}") from None
    if not table.family or not table.lines:
        raise TableError(f"{origin}: a table needs a 'family' line and at least one tensor")
    if table.included:
        if named is None:
            raise TableError(f"{origin}: there is no table '{table.included}' to include")
        table = _inherit(table, named(table.included))
    _checked(table, origin)
    return table


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the number and text of every line that is not blank, and whether it is followed by further indented
    lines."""
    numbered = ((number, line.split("#")[0].rstrip()) for number, line in enumerate(text.splitlines(), 1))
    said = [(number, line) for number, line in numbered if line]
    indents = [len(line) - len(line.lstrip()) for _, line in said]
    for (number, line), indent, following in zip(said, indents, [*indents, 0][1:], strict=True):
        yield number, line, 0 < indent < following


@dataclass(frozen=True)
class _Block:
    """Conditions and notes that the lines of a block share. own: the last condition, if it begins with `when`."""

    indent: int = 0
    when: When = ()
    notes: tuple[Note, ...] = ()
    own: Condition | None = None

    def within(self, text: str) -> _Block:
        """Return a block inside this one that begins with `text`: clauses as after a `;`."""
        if not text:
            return self
        when, notes = _clauses(text)
        return _Block(0, (*self.when, *when), (*self.notes, *notes), when[-1] if when else None)

    def beside(self, other: _Block | None) -> _Block:
        """Return the block for when the condition of the other one, before it, does not hold."""
        if other is None or other.own is None:
            raise TableError("'otherwise' follows a block that begins with 'when'")
        negated = replace(other.own, wanted=False)
        return _Block(0, (*self.when, negated), self.notes, negated)


def _clauses(text: str) -> tuple[When, tuple[Note, ...]]:
    """Read `when CONDITION ; NOTE ; NOTE when CONDITION`."""
    when, notes = [], []
    for clause in filter(None, (piece.strip() for piece in text.split(";"))):
        word, _, rest = clause.partition(" ")
        if word == "when":
            when.append(condition(rest.strip()))
        elif word not in (*NOTES, *AUDITED):
            raise TableError(f"'{word}' is not a note; choose from {', '.join(sorted((*NOTES, *AUDITED)))}")
        else:
            argument, _, asked = f" {rest}".partition(" when ")
            notes.append(Note(word, argument.strip(), (condition(asked),) if asked else ()))
    return tuple(when), tuple(notes)


_TEXTS = {"family": "family", "include": "included", "eps": "eps"}  # heading -> field of `Table`
_LISTS = {"types": "types", "prefix": "prefixes", "ignore": "ignored", "still": "still"}


def _header(table: Table, word: str, rest: str) -> None:
    if word in _TEXTS:
        setattr(table, _TEXTS[word], rest)
    elif word in _LISTS:
        getattr(table, _LISTS[word]).extend(rest.split())
    elif word == "layers":
        table.layers = [_keys(factor) for factor in rest.split("*")]
    elif word == "size":
        name, _, keys = rest.partition("=")
        table.sizes[name.strip()] = _keys(keys)
    elif word == "temperature":
        table.temperature = tuple(rest.split())
    elif word == "refuse":
        asked, _, reason = rest.partition(" ")
        if "=" not in asked or not reason.strip():
            raise TableError("write 'refuse KEY=VALUE reason'")
        table.refused.append((asked, reason.strip()))
    else:
        raise TableError(f"'{word}' is not a heading; choose from {', '.join([*HEADINGS, *SECTIONS])}")


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split("|")]


def _inherit(table: Table, base: Table) -> Table:
    """Return a table with the spaces and the base model of another, which its own replace if they have the same name; a
    new line is inserted after the one before it."""
    lines = [line for line in base.lines if not line.head]
    at = 0
    for number, own in enumerate(table.lines):
        mine = table.lines[:number]
        replaced = [i for i, line in enumerate(lines) if line.full == own.full and not any(line is m for m in mine)]
        at = replaced[0] if replaced else len(lines) if own.head else at
        lines = [line for i, line in enumerate(lines) if i not in replaced]
        lines.insert(at, own)
        at += 1
    return replace(
        table,
        layers=table.layers or base.layers,
        sizes={**base.sizes, **table.sizes},
        ignored=base.ignored + table.ignored,
        still=base.still + table.still,
        refused=base.refused + table.refused,
        temperature=table.temperature or base.temperature,
        eps=table.eps or base.eps,
        spaces={**base.spaces, **table.spaces},
        same=base.same + table.same,
        lines=lines,
    )


def _space(table: Table, text: str, block: _Block) -> None:
    """Read `NAME ... KIND PART per NAME, ... PROPERTY ...`, or `NAME ... = OTHER`."""
    said, *clauses = text.split(";")
    inner = block.within(";".join(clauses))
    if inner.notes:
        raise TableError(f"'{inner.notes[0].word}' is not a note of a space; write 'when KEY=VALUE'")
    words = said.split()
    if "=" in words:
        if words.index("=") in (0, len(words) - 1) or words[-2] != "=" or not inner.when:
            raise TableError("write 'NAME = OTHER ; when CONDITION'")
        table.same += [(name, words[-1], inner.when) for name in words[:-2]]
        return
    kinds = (i for i in range(1, len(words)) if words[i] in ("act", *MOVES) or " ".join(words[i : i + 2]) in MOVES)
    at = next(kinds, None)
    if at is None:
        known = f"{', '.join(MOVES)} and 'act KEY'"
        raise TableError(f"'{words[1]}' is not a kind of space; choose from {known}" if words[1:] else
                         f"space '{words[0]}' needs a kind: one of {known}")  # fmt: skip
    two = words[at] == "act" or " ".join(words[at : at + 2]) in MOVES
    declared = _declared(" ".join(words[at : at + 1 + two]), words[at + 1 + two :])
    for name in words[:at]:
        if not inner.when and name in table.spaces:
            raise TableError(f"space '{name}' is declared twice")
        if inner.when and name not in table.spaces:
            raise TableError(f"declare '{name}' without a condition before 'when KEY=VALUE'")
        base = table.spaces.get(name)
        table.spaces[name] = replace(base, other=(*base.other, (inner.when, declared))) if base else declared


def _declared(kind: str, words: list[str]) -> Declared:
    """Read the words after a kind: `attention per layer, head passes`."""
    part = words.pop(0) if words and words[0] not in ("per", *PROPERTIES) else ""
    per: list[str] = []
    if words[:1] == ["per"]:
        words.pop(0)
        while words and (not per or per[-1].endswith(",")):
            per.append(words.pop(0))
    wrong = next((word for word in words if word not in PROPERTIES), None)
    if wrong:
        raise TableError(f"'{wrong}' is not a property of a space; choose from per, {', '.join(PROPERTIES)}")
    return Declared(kind, part, tuple(name.rstrip(",") for name in per), tuple(words))


_NORM = re.compile(rf"({'|'.join(NORMS)}):\s*(.+?)\s*->\s*(.+)$")
_SEVERAL = re.compile(r"\{([^{}]*,[^{}]*)\}(\?{0,2})$")


def _tensors(name: str, rest: str, heading: str, block: _Block, head: bool) -> Iterator[Line]:
    """Yield the line, or the two of `NAME.{weight,bias}`: the bias has the axis that the weight writes (of two that it
    reads, as for keys, the first)."""
    expression, _, clauses = (piece.strip() for piece in rest.partition(";"))
    inner = block.within(clauses)
    norm = _NORM.match(expression)
    axes = parse(norm[3] if norm else expression)
    through = _through(norm[1], parse(norm[2]), axes) if norm else None
    absolute = head or name.startswith("/")
    several = _SEVERAL.search(name)
    endings = [f"{one.strip()}{several[2]}" for one in several[1].split(",")] if several else [""]
    stem = name[: several.start()] if several else name
    for number, ending in enumerate(endings):
        spelled = ending.rstrip("?")
        pattern = (stem + (f"{{{spelled}}}" if "|" in spelled else spelled)).removeprefix("/")
        optional = (ending or name).endswith("?")
        if number == 1:
            if not axes:
                raise TableError(f"'{name}' has no axes for its bias to share")
            read = [[leaf.dual for leaf in leaves(axis)][-1] for axis in axes]
            axes, through = (axes[-1:] if read[0] and not read[-1] else axes[:1]), None
        yield Line(pattern.rstrip("?"), optional, axes, through, inner.notes, inner.when, heading, head, absolute,
                   (ending or name).endswith("??"))  # fmt: skip


def _audited(table: Table, name: str, block: _Block) -> None:
    """Add notes to the lines above with this name."""
    found = [i for i, line in enumerate(table.lines) if spelled(line.full) == spelled(name)]
    if not found:
        raise TableError(f"'{name}' is not a tensor of the lines above")
    if wrong := next((note.word for note in block.notes if note.word not in AUDITED), None):
        raise TableError(f"'{wrong}' is not only for the audit: write it after the tensor's axes")
    for i in found:
        table.lines[i] = replace(table.lines[i], clauses=(*table.lines[i].clauses, *block.notes))


def _through(kind: str, source: tuple[Axis, ...], target: tuple[Axis, ...]) -> Norm:
    """Return a norm of the last axis of `source`."""
    over = [leaf.space for leaf in space_leaves(source[-1:])]
    into = [leaf.space for leaf in space_leaves(target)]
    if not over or not into:
        raise TableError(f"a norm goes from a space to a space, as in '{kind}: stream -> normed'")
    around = {space for _, outer in nesting(source) for space in outer}
    beside = tuple(space for space in over[:-1] if space not in around)
    if beside and source[-1] not in (target[-1], *getattr(target[-1], "parts", ())):
        raise TableError("a norm of several parts side by side writes back into them")
    first = target[0].parts[0] if isinstance(target[0], Flat) else target[0]
    copies = int(first.space) if isinstance(first, Leaf) and first.constant else 1
    stored = kind.removesuffix("1p")
    return Norm(stored, over[-1], into[-1], copies, tuple(over), beside, unit=1.0 if kind == stored else 0.0)


def _checked(table: Table, origin: str) -> None:
    """Declare the spaces that are only targets of norms (linear, and per layer if the norm is), and raise TableError
    for undefined names."""
    for line in table.lines:
        if line.norm and line.norm.target.partition(".")[0] not in table.spaces:
            table.spaces[line.norm.target] = Declared("linear", per=("layer",) if line.heading else ())
    simple = {name for name, declared in table.spaces.items() if "stage" not in declared.per}
    for line in table.lines:
        where = f"{origin}: '{line.full}  {show(line.axes)}'"
        named = [leaf.space for leaf in space_leaves(line.axes)]
        for space in (*named, *(line.norm.over if line.norm else ())):
            name, _, which = space.partition(".")
            if name not in table.spaces:
                raise TableError(f"{where} names the undeclared space '{name}'")
            if space not in simple and (
                name in simple or which not in ("first", "last", *(["next", ""] if line.heading else []))
            ):
                raise TableError(f"{where}: '{space}' has no stage here; see 'stage'")
        if line.heading and "{}" in line.pattern:
            raise TableError(f"{where} has a layer index, which belongs in the 'layer' heading")
        indexed = re.findall(r"\{(\w+)\}", line.full)
        if len(indexed) > 1 or not set(indexed) <= set(named):
            raise TableError(f"{where}: only one space, of its axes, may be an index, as in 'experts.{{expert}}.up'")
    for name, other, _ in table.same:
        for space in {name, other} - table.spaces.keys():
            raise TableError(f"{origin}: '{name} = {other}' names the undeclared space '{space}'")
    for name, declared in table.spaces.items():
        per = {space for one in (declared, *(other for _, other in declared.other)) for space in one.per}
        for space in per - {"layer", "stage"} - table.spaces.keys():
            raise TableError(f"{origin}: '{name}' is per '{space}', which is not a space")
    table.names = frozenset(spelled(line.full) for line in table.lines)
    names = table.names | {spelled(line.pattern) for line in table.lines}
    whens = [*(line.when for line in table.lines), *(when for *_, when in table.same)]
    for lacking in (name for when in whens for asked in when for name in asked.lacking):
        if lacking not in names:
            raise TableError(f"{origin}: 'lacks {lacking}' names no tensor of the table")
