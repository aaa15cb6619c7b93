# SPDX-License-Identifier: Apache-2.0
"""Family tables: the text that says which spaces a model's axes live in, and its meeting with a checkpoint.

A table has a header, a list of spaces, and one line per tensor:

    family gpt2
    types  gpt2                           config.json's model_type
    prefix transformer.                   optional base-model prefix(es)
    include bert                          takes over another table's spaces and tensors (not its types, prefixes and
                                          heads); what this table names itself replaces what it took over
    layers n_layer                        config key that counts the layers (checked); `a * b` multiplies
    size   head = n_head                  sizes that shapes alone do not tell; `a | b` tries keys in turn, `a * b / c`
                                          rounds down, `a.b` looks inside, `a when KEY=VALUE` asks first

    temperature qk                        attention divides logits by the root of this space's size
    eps    layer_norm_epsilon             config key of the norms' eps

    still  vision_tower.                  names that begin so are kept, and nothing acts on them
    refuse KEY=VALUE reason               models with such a config have no table, for this reason

    spaces                                name, kind, part, `layer` where every layer has its own, or `stage`
        vocab   fixed
        stream  linear       stream
        head    permutation  attention  layer
        qk      linear       attention  layer

    tensors                               name (`?` may be absent), axes, notes
        wte.weight                        vocab stream
    layer h.{}
        attn.c_attn.weight                attn_in' [(head qk) | (head qk') | (head vo)]
        attn.c_proj.bias                  stream                        ; part attention
    tensors
        ln_f.weight                       layernorm: stream -> final
        ln_f.bias                         final
    heads                                 never carry the base-model prefix
        lm_head.weight?                   vocab final'                  ; tied wte.weight

A second line `stream  ones ; when KEY=VALUE` gives a space another kind for such configs. `layer h.{} ; when
KEY=VALUE` and `tensors ; when KEY=VALUE` speak of all lines below.

A space of every `stage` belongs to the first index of a block `layer stages.{}.blocks.{}`. There `stream` is the
stage's own and `stream.next` that of the next; elsewhere are `stream.first` and `stream.last`. A size that the config
lists is that of each stage. A name that begins with `/` is given in full, without the prefix.

`{a|b}` in a name are spellings of one tensor; the first is its role. A kind `act KEY` reads the activation
function's name from the config (relu -> relu, tanh -> odd, else permutation). Spaces that occur only as
the target of a norm need no declaration. `ignore PATTERN` names buffers that hold no parameters.

`experts.{expert}.w1.weight  (expert ffn) mlp_in'` stands for a tensor of every expert, joined along the axis in
which `expert` stands, before all but what groups experts. `rmsnorm: qk -> qk` normalises inside every head, with one
weight for all heads; `rmsnorm: (head qk) -> (head qk)` all heads at once; `layernorm: (4 stream) -> (4 merged)` four
vectors side by side as one. A part of a concatenated axis may be empty.

Notes after `;`
    tied ROLE            holds the same numbers as ROLE when the config ties embeddings
    part NAME            counts to this part of the model (for a bias whose axes do not say)
    when KEY=VALUE, ...  the line holds only for such configs (`!=` for all others; for a list: a part of an item)
    from N, until N      the first N layers lack this tensor, or no others have it (a number, or a config key)
    else A = B           where this tensor is absent, space A is space B (a projection that equal sizes spare)
    instead NAME         a layer has either this tensor or NAME, of its block
    invisible [SPACE]    no output depends on this tensor (or its block in SPACE): a key bias under softmax
    softmax [A B, C]     a softmax over the first axis follows, which does not see what all its entries share; or each
                         of several lists of parts of that axis
    passes [SPACE]       a constant that attention passes on unchanged: a value bias
    into ROLE ...        what all rows share can move into each ROLE: summed embedding tables
    rows ROLE ...        except the first rows: one each for the ROLEs that are there (class token)

    unused [SPACE|N]     the model reads these numbers (or the first N rows) only through what is tied to them, or never
    idle A ...           the last layer of a model with a head does not use these parts of the first axis
    beside ROLE          where this tensor is, so is ROLE, even where a tie leaves it out of the file
    biases ROLE          the bias of ROLE, which a `.bias` of the same name is without being said; it is `beside` ROLE
    nonlinear            a nonlinearity stands between this tensor and the space that it writes or reads; or does so
                         `when KEY=VALUE`
    unscaled SPACE       no output depends on its scale, for each entry of SPACE by itself: a norm over time follows
    over SPACE           what stands on the axes after that of SPACE has a map for each of its entries, as in `( )`
    constant ROLE ...    what this tensor makes of a constant can stand in each of these vectors of its block instead
    against ROLE         this vector only ever meets differences between the rows of that tensor of its block
    chooses              decides which experts are taken, and nothing else
    scales NAME ...      multiplies channel by channel what these tensors of its block write (LayerScale)
    padded               zeros may stand beside what this norm puts out, so its bias cannot move into what reads it

The lines stand in the order of execution: a tensor's place among the norms says which of them its output meets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from .axes import Axis, Flat, Leaf, leaves, nesting, parse, rename, show, size
from .signature import MOVES, Entry, Norm, Signature, Space, batches


class TableError(ValueError):
    """A table that cannot be read, or a checkpoint that does not fit its table."""


@dataclass(frozen=True)
class Declared:
    kind: str
    part: str = ""
    per_layer: bool = False
    per_stage: bool = False
    other: tuple[tuple[str, str], ...] = ()  # a condition, and the kind where it holds


@dataclass(frozen=True)
class Line:
    """One tensor line. `heading` is the pattern of the enclosing `layer` block, or empty."""

    pattern: str
    optional: bool
    axes: tuple[Axis, ...]
    norm: tuple[str, str, str] | None
    notes: Mapping[str, str]
    heading: str
    head: bool
    absolute: bool = False  # given in full

    @property
    def full(self) -> str:
        return f"{self.heading}.{self.pattern}" if self.heading else self.pattern


@dataclass
class Table:
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
    lines: list[Line] = field(default_factory=list)


_NORM = re.compile(r"(layernorm|rmsnorm1p|rmsnorm):\s*(.+?)\s*->\s*(.+)$")
_NOTES = {"tied", "part", "invisible", "passes", "into", "rows", "nonlinear", "beside", "unused", "when", "else",
          "from", "until", "scales", "padded", "over", "softmax", "chooses", "biases",
          "constant", "against", "idle", "unscaled", "instead"}  # fmt: skip


def read_table(text: str, origin: str = "table", named: Callable[[str], Table] | None = None) -> Table:
    """Parse a table; `named` finds the tables that it may include.

    Raises TableError naming `origin` and the line that cannot be read.
    """
    table = Table()
    section, heading, condition = "", "", ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].rstrip()
        if not line:
            continue
        try:
            word, _, rest = line.strip().partition(" ")
            rest = rest.strip()
            if not line[0].isspace():
                if word in ("spaces", "tensors", "heads", "layer"):
                    section = "tensors" if word == "layer" else word
                    heading, condition = _section(rest)
                else:
                    _header(table, word, rest)
            elif section == "spaces":
                _space(table, word, rest.split())
            elif section in ("tensors", "heads"):
                table.lines.append(_tensor(word, rest, heading, condition, section == "heads"))
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
    _declare_norm_targets(table, origin)
    return table


def _section(rest: str) -> tuple[str, str]:
    """The pattern of a block, and the condition of all its lines: `layers.{} ; when KEY=VALUE`."""
    heading, _, note = (part.strip() for part in rest.partition(";"))
    if note and not note.startswith("when "):
        raise TableError(f"'{note}' is no note of a block; write 'when KEY=VALUE'")
    return heading, note.removeprefix("when ")


def _header(table: Table, word: str, rest: str) -> None:
    if word == "family":
        table.family = rest
    elif word == "types":
        table.types += rest.split()
    elif word == "prefix":
        table.prefixes += rest.split()
    elif word == "include":
        table.included = rest
    elif word == "layers":
        table.layers = [_keys(factor) for factor in rest.split("*")]
    elif word == "ignore":
        table.ignored += rest.split()
    elif word == "still":
        table.still += rest.split()
    elif word == "refuse":
        condition, _, reason = rest.partition(" ")
        if "=" not in condition or not reason.strip():
            raise TableError("write 'refuse KEY=VALUE reason'")
        table.refused.append((condition, reason.strip()))
    elif word == "temperature":
        table.temperature = tuple(rest.split())
    elif word == "eps":
        table.eps = rest
    elif word == "size":
        name, _, keys = rest.partition("=")
        table.sizes[name.strip()] = _keys(keys)
    else:
        raise TableError(f"'{word}' is no heading; known are family, types, prefix, include, layers, size, "
                         "temperature, eps, ignore, still, refuse, spaces, tensors, layer, heads")  # fmt: skip


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split("|")]


def _inherit(table: Table, base: Table) -> Table:
    """A table with the spaces and the base model of another, which its own replace where they have the same name;
    a new line goes after the one before it."""
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
        lines=lines,
    )


def _space(table: Table, name: str, words: list[str]) -> None:
    if not words:
        raise TableError(f"space '{name}' needs a kind: one of {', '.join(MOVES)} or 'act KEY'")
    kind = words.pop(0)
    if kind == "act" and words:
        kind = f"act {words.pop(0)}"
    elif kind not in MOVES:
        raise TableError(f"'{kind}' is no kind of space; known are {', '.join(MOVES)} and 'act KEY'")
    if ";" in words:
        if name not in table.spaces or words[:2] != [";", "when"]:
            raise TableError(f"write '{name} KIND PART' first, then '{name} KIND ; when KEY=VALUE'")
        known = table.spaces[name]
        table.spaces[name] = replace(known, other=(*known.other, (" ".join(words[2:]), kind)))
        return
    per_layer, per_stage = "layer" in words, "stage" in words
    parts = [word for word in words if word not in ("layer", "stage")]
    if name in table.spaces:
        raise TableError(f"space '{name}' is declared twice")
    table.spaces[name] = Declared(kind, parts[0] if parts else "", per_layer, per_stage)


def _tensor(name: str, rest: str, heading: str, condition: str, head: bool) -> Line:
    expression, *clauses = (piece.strip() for piece in rest.split(";"))
    notes = {}
    for clause in clauses:
        word, _, argument = clause.partition(" ")
        if word not in _NOTES:
            raise TableError(f"'{word}' is no note; known are {', '.join(sorted(_NOTES))}")
        notes[word] = argument.strip()
    if condition:
        notes["when"] = ", ".join(filter(None, (condition, notes.get("when"))))
    norm = _NORM.match(expression)
    axes = parse(norm[3] if norm else expression)
    through = (norm[1], _innermost(parse(norm[2])), _innermost(axes)) if norm else None
    absolute = head or name.startswith("/")
    pattern = name.removesuffix("?").removeprefix("/")
    return Line(pattern, name.endswith("?"), axes, through, notes, heading, head, absolute)


def _innermost(axes: tuple[Axis, ...]) -> str:
    return [leaf.space for leaf in leaves(axes)][-1]


def _declare_norm_targets(table: Table, origin: str) -> None:
    """A space that is only ever the target of a norm is linear, and per layer where its norm is."""
    for line in table.lines:
        if line.norm and line.norm[2].partition(".")[0] not in table.spaces:
            table.spaces[line.norm[2]] = Declared("linear", "", bool(line.heading))
    for line in table.lines:
        for leaf in leaves(line.axes):
            name, _, which = leaf.space.partition(".")
            where = f"{origin}: '{line.full}  {show(line.axes)}'"
            if not leaf.constant and name not in table.spaces:
                raise TableError(f"{where} names the undeclared space '{name}'")
            known = ("first", "last", *(["next", ""] if line.heading else []))
            if not leaf.constant and which not in (known if table.spaces[name].per_stage else ("",)):
                raise TableError(f"{where}: '{leaf.space}' is of no stage here; see 'stage'")


# --- a table meets a checkpoint -------------------------------------------------------------------------------


def _regex(pattern: str) -> re.Pattern[str]:
    """`h.{}.{weight|gamma}` -> a regex with a numbered group for every layer index."""
    out = ""
    for piece in re.split(r"(\{[^}]*\})", pattern):
        if piece == "{}":
            out += r"(\d+)"
        elif "|" in piece:
            out += "(?:" + "|".join(map(re.escape, piece[1:-1].split("|"))) + ")"
        else:
            out += re.escape(piece)
    return re.compile(out)


def _role(pattern: str, indices: tuple[str, ...]) -> str:
    """The first spelling of a pattern, its layer indices filled in."""
    given = iter(indices)
    return re.sub(r"\{([^}]*)\}", lambda found: _spelled(found[1]) if found[1] else next(given), pattern)


def _spelled(choices: str) -> str:
    """The first of several spellings; an index such as `{expert}` stands for itself."""
    return choices.split("|")[0] if "|" in choices else "{" + choices + "}"


@dataclass
class _Pieces:
    """The tensors of one line that differ in an index, by that index."""

    joint: int
    names: dict[int, str] = field(default_factory=dict)


def _join(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], dict[str, _Pieces]]:
    """Shapes with the tensors of all experts joined into one, whose name has `{expert}` for their index.

    Raises TableError where an index is left out, or shapes differ.
    """
    indexed = [(line, found[1]) for line in table.lines if (found := re.search(r"\{(\w+)\}", line.full))]
    prefixes = "|".join(map(re.escape, [*table.prefixes, ""]))
    matchers = []
    for line, word in indexed:
        before, after = (_regex(part).pattern for part in line.full.split("{" + word + "}"))
        joint = next(i for i, axis in enumerate(line.axes) if word in (leaf.space for leaf in leaves(axis)))
        matchers.append((re.compile(f"((?:{prefixes}){before})(?P<index>\\d+)({after})"), word, joint))
    whole: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, _Pieces] = {}
    for name, shape in shapes.items():
        hits = ((matcher.fullmatch(name), word, joint) for matcher, word, joint in matchers)
        match, word, joint = next((hit for hit in hits if hit[0]), (None, "", 0))
        if match is None:
            whole[name] = tuple(shape)
            continue
        start, end = match.span("index")
        key = f"{name[:start]}{{{word}}}{name[end:]}"
        pieces.setdefault(key, _Pieces(joint)).names[int(match["index"])] = name
    for key, each in pieces.items():
        names, joint = each.names, each.joint
        one = tuple(shapes[names[min(names)]])
        odd = next((name for name in names.values() if tuple(shapes[name]) != one), None)
        if odd is not None or set(names) != set(range(len(names))):
            raise TableError(f"the tensors '{key}' are not numbered from 0 without gaps" if odd is None else
                             f"'{odd}' has shape {tuple(shapes[odd])}, others of '{key}' have {one}")  # fmt: skip
        whole[key] = (*one[:joint], len(names) * one[joint], *one[joint + 1 :])
    return whole, pieces


def lookup(config: Mapping[str, Any], keys: list[str]) -> Any:
    """The first of `keys` that the config has (a number stands for itself), or None."""
    for choice in keys:
        key, _, condition = choice.partition(" when ")
        if not _holds(condition.strip(), config):
            continue
        words = re.split(r"\s*([*/])\s*", key)
        values = [_value(config, word) for word in words[::2]]
        if None in values:
            continue
        if len(values) == 1:
            return values[0]
        return int(prod(v if sign == "*" else 1 / v for sign, v in zip(["*", *words[1::2]], values, strict=True)))
    return None


def _value(config: Mapping[str, Any], key: str) -> Any:
    """A number, or what the config has under `key`, or under `inner` of `outer` for `outer.inner`; or None."""
    if key.isdigit():
        return int(key)
    outer, _, inner = key.partition(".")
    found = config.get(outer)
    return (found.get(inner) if isinstance(found, Mapping) else None) if inner else found


def _holds(condition: str, config: Mapping[str, Any]) -> bool:
    """Whether a `when KEY=VALUE` or `when KEY!=VALUE` is true of a config; of several, with commas, all."""
    if not condition:
        return True
    if "," in condition:
        return all(_holds(part.strip(), config) for part in condition.split(","))
    key, _, value = condition.partition("=")
    given = _value(config, key.removesuffix("!").strip())
    value = value.strip()
    if isinstance(given, str) and "|" in given:  # a list in an older config
        given = given.split("|")
    is_so = any(value in str(item) for item in given) if isinstance(given, (list, tuple)) else str(given) == value
    return is_so != key.endswith("!")


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def resolve(table: Table, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Signature:
    """Fit a table to a checkpoint: every tensor found in it exactly once, every size solved for.

    shapes: tensor name on disk -> shape. config: the model's configuration as a dictionary.
    Raises TableError naming the tensors that are unknown, missing, doubled, or of a wrong shape, or a configuration
    that has no table.
    """
    for condition, reason in table.refused:
        if _holds(condition, config):
            keys = dict.fromkeys(part.partition("=")[0].rstrip("!") for part in condition.split(","))
            given = ", ".join(f"{key} = {_value(config, key)}" for key in keys)
            raise TableError(f"{table.family}: models with {given} have no table yet: {reason}")
    lines = [_bent(_counted(line, config), config) for line in table.lines
             if _holds(line.notes.get("when", ""), config)]  # fmt: skip
    table = replace(table, lines=lines)
    entries, shapes = _kept(table, shapes)
    shapes, pieces = _join(table, shapes)
    prefix = next((p for p in table.prefixes if any(name.startswith(p) for name in shapes)), "")
    found = _locate(table, shapes, prefix)
    numbers = _layer_numbers(table, found, config)
    _require(table, found, numbers, prefix)

    found = dict(sorted(found.items(), key=lambda item: _order(table, *item[1][1:])))
    same = _spared(table, found)
    stages = 1 + max((int(indices[0]) for _, _, indices in found.values() if indices), default=0)
    placed: dict[str, _Placed] = {}
    for role, (name, line, indices) in found.items():
        layer = numbers[line.heading][indices] if line.heading else None
        here = same | _spared_here(table, found, line.heading, indices)
        keys = {}
        mentioned = [leaf.space for leaf in leaves(line.axes) if not leaf.constant] + list((line.norm or ())[1:])
        for space in dict.fromkeys(mentioned):
            word, _, which = here.get(space, space).partition(".")
            declaration, stage = table.spaces[word], int(indices[0]) if indices else 0
            if declaration.per_stage:
                stage = {"": stage, "next": stage + 1, "first": 0, "last": stages - 1}[which]
                keys[space], where = f"{word}.{stage}", None
            elif declaration.per_layer and line.heading:
                keys[space], where = f"{_role(line.heading, indices)}.{word}", layer
            else:
                keys[space], where = word, None
            placed[keys[space]] = _Placed(word, declaration, where, stage)
        norm = line.norm and Norm(line.norm[0], keys[line.norm[1]], keys[line.norm[2]], _copies(line.axes))
        notes = dict(line.notes)
        for word in {"scales", "constant", "against"} & notes.keys():  # in the same block
            notes[word] = " ".join(f"{_role(line.heading, indices)}.{other}" for other in notes[word].split())
        if "over" in notes:
            notes["over"] = keys[notes["over"]]
        entries[role] = Entry(role, name, tuple(shapes[name]), tuple(rename(axis, keys) for axis in line.axes),
                              layer, norm or None, None, line.head, notes)  # fmt: skip

    sizes = _solve(entries, placed, table, config)
    absent = _absent(table, entries, same, placed, config, prefix)
    root, aliases = _unite(entries, absent, list(placed), config)
    for role, entry in entries.items():
        if entry.name in pieces:
            each = pieces[entry.name]
            names = tuple(each.names[i] for i in range(len(each.names)))
            entries[role] = replace(entry, pieces=names, joint=each.joint)
    for role in aliases:
        entry = entries[role]
        entries[role] = Entry(entry.role, entry.name, entry.shape, entry.axes, entry.layer, entry.norm,
                              entry.notes["tied"], entry.head, entry.notes)  # fmt: skip

    written = _written([*entries.values(), *absent.values()], root)
    kind = {
        key: _kind(place.declared, config) if sizes[key] and root[key] in written else "fixed"
        for key, place in placed.items()
    }
    outputs = _outputs(table, [*entries.values(), *absent.values()], same)
    batch = batches(entries, root)
    spaces = {
        key: Space(
            key, at.name, sizes[key], kind[key], at.declared.part, at.layer, batch.get(root[key], ()), key in outputs
        )
        for key, at in placed.items()
    }
    return Signature(table.family, entries, spaces, root, absent, table.temperature, table.eps)


@dataclass(frozen=True)
class _Placed:
    """A space of the model: its name in the table, its declaration, the layer it belongs to and the stage it is in."""

    name: str
    declared: Declared
    layer: int | None
    stage: int


def _counted(line: Line, config: Mapping[str, Any]) -> Line:
    """The line with the numbers that its notes `from` and `until` take from the config."""
    numbers = {word: lookup(config, [line.notes[word]]) for word in ("from", "until") if word in line.notes}
    lacking = next((word for word, number in numbers.items() if not isinstance(number, int)), None)
    if lacking:
        raise TableError(f"the config lacks '{line.notes[lacking]}' (which layers have '{line.full}')")
    return replace(line, notes={**line.notes, **{word: str(number) for word, number in numbers.items()}})


def _bent(line: Line, config: Mapping[str, Any]) -> Line:
    """The line without the note `nonlinear`, where that has a condition that does not hold."""
    condition = line.notes.get("nonlinear", "").removeprefix("when ")
    notes = {word: text for word, text in line.notes.items() if word != "nonlinear" or _holds(condition, config)}
    return replace(line, notes=notes)


def _kept(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Entry], dict[str, tuple[int, ...]]]:
    """Entries, on which nothing acts, of the tensors that stand still; and the shapes of all others."""
    entries, rest = {}, {}
    for name, shape in shapes.items():
        found = next(((p, match) for p in table.still if (match := _regex(p).match(name))), None)
        if found is None:
            rest[name] = tuple(shape)
            continue
        role = _role(found[0], ()) + name[found[1].end() :]
        entries[role] = Entry(role, name, tuple(shape), tuple(Leaf(str(length)) for length in shape))
    return entries, rest


def _copies(axes: tuple[Axis, ...]) -> int:
    """How many vectors a norm takes side by side: 4 in `(4 merged)`."""
    first = axes[0].parts[0] if isinstance(axes[0], Flat) else axes[0]
    return int(first.space) if isinstance(first, Leaf) and first.constant else 1


def _order(table: Table, line: Line, indices: tuple[str, ...]) -> tuple[Any, ...]:
    """The table's order is that of execution: blocks as they stand, a layer after the other, then line by line. Blocks
    whose names begin alike take turns, a stage after the other."""
    number = next(i for i, other in enumerate(table.lines) if other is line)
    stem, start = line.heading.partition("{}")[0], number
    while start and table.lines[start - 1].heading.partition("{}")[0] == stem:
        start -= 1
    section = number
    while section and table.lines[section - 1].heading == line.heading:
        section -= 1
    where = tuple(map(int, indices))
    return start, where[:1], section, where, number


def _absent(
    table: Table,
    entries: Mapping[str, Entry],
    same: Mapping[str, str],
    declared: Collection[str],
    config: Mapping[str, Any],
    prefix: str,
) -> dict[str, Entry]:
    """Tied tensors that the file leaves out, since it holds their numbers under another name: of a head, or `beside`
    what they are tied to (the encoder's embedding beside the decoder's).

    A weight is there where its bias is stored, and a bias where its weight is. A weight without either is there
    where the model has a head (its names carry a prefix, or its architecture says so), the config ties, and
    nothing else reads the space that it would read, or only what stands `beside` it.
    """
    architectures = [str(item) for item in config.get("architectures") or ()]
    headed = bool(prefix) or any("For" in item or "Head" in item for item in architectures)
    ties = headed and config.get("tie_word_embeddings", True)
    unread = set(declared) - {leaf.space for entry in entries.values() for leaf in leaves(entry.axes) if leaf.dual}
    beside = {entry.notes.get(note) for entry in entries.values() for note in ("beside", "biases")}
    found: dict[str, Entry] = {}
    for line in table.lines:
        other = entries.get(line.notes.get("tied", ""))
        role = _role(line.full, ()) if "{}" not in line.full else ""
        if other is None or role in entries or not (line.head or role in beside):
            continue
        axes = tuple(rename(axis, same) for axis in line.axes)
        reads = {leaf.space for leaf in leaves(axes) if leaf.dual}
        module, _, what = role.rpartition(".")
        sibling = f"{module}.{'bias' if what == 'weight' else 'weight'}"
        if (
            not line.head
            or sibling in entries
            or sibling in found
            or (ties and reads and (reads <= unread or role in beside))
        ):
            found[role] = Entry(role, role, other.shape, axes, None, None, other.role, line.head, line.notes, False)
    return found


def _outputs(table: Table, entries: list[Entry], same: Mapping[str, str]) -> set[str]:
    """Spaces that leave the model: nothing reads them, or only a head would and there is none."""
    inner = {name for entry in entries for _, outer in nesting(entry.axes) for name in outer}
    inner |= {entry.notes["over"] for entry in entries if "over" in entry.notes}
    written = {leaf.space for entry in entries for leaf in leaves(entry.axes)}
    found = written - inner - _read(entries)
    if not any(entry.head for entry in entries):
        heads = [line for line in table.lines if line.head]
        read = {leaf.space for line in heads for leaf in leaves(line.axes) if leaf.dual}
        read |= {line.norm[1] for line in heads if line.norm}  # BEiT puts its stream out as it is; a head norms it
        found |= {same.get(space, space) for space in read}
    around = (outer for entry in entries for leaf, outer in nesting(entry.axes) if leaf.space in found)
    return found.union(*around)


def _written(entries: Collection[Entry], root: Mapping[str, str]) -> set[str]:
    """Roots of the spaces that a tensor writes into. What enters the model from outside is only read."""
    return {root[leaf.space] for entry in entries for leaf in leaves(entry.axes) if not leaf.dual and not leaf.constant}


def _read(entries: Collection[Entry]) -> set[str]:
    """Spaces that a tensor or a norm reads."""
    found = {leaf.space for entry in entries for leaf in leaves(entry.axes) if leaf.dual}
    return found | {entry.norm.source for entry in entries if entry.norm}


def _locate(
    table: Table, shapes: Mapping[str, tuple[int, ...]], prefix: str
) -> dict[str, tuple[str, Line, tuple[str, ...]]]:
    """Place every tensor: role -> (name on disk, line, layer indices)."""
    matchers = [(_regex(line.full), line) for line in table.lines]
    ignored = [_regex(pattern) for pattern in table.ignored]
    found: dict[str, tuple[str, Line, tuple[str, ...]]] = {}
    unknown = []
    for name in shapes:
        bare = name.removeprefix(prefix)
        if any(pattern.fullmatch(bare) for pattern in ignored):
            continue
        for matcher, line in matchers:
            candidate = name if line.absolute else bare
            if not line.absolute and prefix and bare == name:
                continue  # outside the base model: only a head can be meant
            match = matcher.fullmatch(candidate)
            if match:
                role = _role(line.full, match.groups())
                if role in found:
                    raise TableError(f"'{found[role][0]}' and '{name}' are spellings of one tensor; remove one of them")
                found[role] = (name, line, match.groups())
                break
        else:
            unknown.append(name)
    if unknown:
        raise TableError(f"{table.family}: the table does not know {_some(unknown)}")
    return found


def _layer_numbers(
    table: Table, found: Mapping[str, tuple[str, Line, tuple[str, ...]]], config: Mapping[str, Any]
) -> dict[str, dict[tuple[str, ...], int]]:
    """Per `layer` block: its index tuples in order -> layer number."""
    numbers: dict[str, dict[tuple[str, ...], int]] = {}
    for heading in dict.fromkeys(line.heading for line in table.lines if line.heading):
        indices = {where for _, line, where in found.values() if line.heading == heading}
        ordered = sorted(indices, key=lambda where: tuple(map(int, where)))
        numbers[heading] = {where: number for number, where in enumerate(ordered)}
    given = (lookup(config, keys) for keys in table.layers)
    factors = [sum(each) if isinstance(each, (list, tuple)) else each for each in given]  # Swin: layers of each stage
    first = next(iter(numbers), None)
    if factors and None not in factors and first is not None and len(numbers[first]) != prod(factors):
        raise TableError(f"the config counts {prod(factors)} layers, the weights hold {len(numbers[first])}")
    return numbers


def _require(
    table: Table,
    found: Mapping[str, tuple[str, Line, tuple[str, ...]]],
    numbers: Mapping[str, Mapping[tuple[str, ...], int]],
    prefix: str,
) -> None:
    """Every tensor that must be there is; one that may be absent is so in all layers or in none."""
    early = [name for name, line, where in found.values() if _lacks(line, where)]
    if early:
        raise TableError(f"{table.family}: the table knows {_some(early)} only in other layers")
    missing = []
    for line in table.lines:
        if line.head:
            continue
        where = numbers[line.heading] if line.heading else [()]
        other = {indices for indices in where if _instead(line, indices) in found}
        both = next((role for indices in other if (role := _role(line.full, indices)) in found), None)
        if both:
            raise TableError(f"{table.family}: a layer has either '{both}' or '{line.notes['instead']}', not both")
        roles = [_role(line.full, i) for i in where if not _lacks(line, i) and i not in other]
        absent = [role if line.absolute else prefix + role for role in roles if role not in found]
        if not line.optional or len(absent) < len(roles):
            missing += absent
    if missing:
        raise TableError(f"{table.family}: the weights lack {_some(missing)}")


def _instead(line: Line, indices: tuple[str, ...]) -> str | None:
    """The role that a layer has where it lacks this one."""
    return _role(f"{line.heading}.{line.notes['instead']}", indices) if "instead" in line.notes else None


def _spared(table: Table, found: Mapping[str, object]) -> dict[str, str]:
    """Spaces that are others here, since the tensor between them is absent: the notes `else A = B, C = D`."""
    able = (line for line in table.lines if not line.heading and "else" in line.notes)
    absent = (line for line in able if _role(line.full, ()) not in found)
    return {space: other for line in absent for space, other in _otherwise(line)}


def _spared_here(table: Table, found: Mapping[str, object], heading: str, indices: tuple[str, ...]) -> dict[str, str]:
    """The same for a layer."""
    able = (line for line in table.lines if heading and line.heading == heading and "else" in line.notes)
    absent = (line for line in able if _role(line.full, indices) not in found)
    return {space: other for line in absent for space, other in _otherwise(line)}


def _otherwise(line: Line) -> Iterator[tuple[str, str]]:
    """The pairs of a note `else A = B, C = D`."""
    for pair in filter(None, line.notes.get("else", "").split(",")):
        space, _, other = pair.partition("=")
        yield space.strip(), other.strip()


def _lacks(line: Line, indices: tuple[str, ...]) -> bool:
    """Whether this layer comes before the first that has the tensor, or after the last."""
    if not indices:
        return False
    layer = int(indices[-1])
    return layer < int(line.notes.get("from", 0)) or layer >= int(line.notes.get("until", layer + 1))


def _solve(
    entries: Mapping[str, Entry],
    placed: Mapping[str, _Placed],
    table: Table,
    config: Mapping[str, Any],
) -> dict[str, int]:
    """Sizes of all spaces from the config's counts and the tensors' shapes."""
    sizes: dict[str, int] = {}
    for key, place in placed.items():
        if (name := place.name) in table.sizes:
            value = lookup(config, table.sizes[name])
            if isinstance(value, (list, tuple)):
                value = value[place.stage] if place.stage < len(value) else None
            if not isinstance(value, int) or value < 1:
                raise TableError(f"the config lacks '{' or '.join(table.sizes[name])}' (number of '{name}')")
            sizes[key] = value
    for entry in entries.values():
        if len(entry.axes) != len(entry.shape):
            raise TableError(f"'{entry.name}' has shape {entry.shape}, its axes are '{show(entry.axes)}'")
    open_axes = [
        (entry, axis, length)
        for entry in entries.values()
        for axis, length in zip(entry.axes, entry.shape, strict=True)
    ]
    progress = True
    while progress and open_axes:
        progress, waiting = False, []
        for entry, axis, length in open_axes:
            unknown = {leaf.space for leaf in leaves(axis) if not leaf.constant and leaf.space not in sizes}
            if len(unknown) > 1:
                waiting.append((entry, axis, length))
                continue
            progress = True
            if unknown:  # an axis's size is linear in the one unknown: size = a + b * unknown
                name = unknown.pop()
                a = size(axis, {**sizes, name: 0})
                b = size(axis, {**sizes, name: 1}) - a
                value, remainder = divmod(length - a, b)
                if remainder or value < (0 if a else 1):  # none is left where the axis has other parts
                    raise TableError(
                        f"'{entry.name}' has shape {entry.shape}: {length} does not split into '{show((axis,))}' "
                        f"with {_known(axis, sizes)}"
                    )
                sizes[name] = value
            elif size(axis, sizes) != length:
                raise TableError(
                    f"'{entry.name}' has shape {entry.shape}: '{show((axis,))}' should be {size(axis, sizes)}, "
                    f"not {length}"
                )
        open_axes = waiting
    if open_axes:
        entry, axis, _ = open_axes[0]
        raise TableError(
            f"'{entry.name}': the sizes in '{show((axis,))}' cannot be told from shapes; add a 'size' line"
        )
    return sizes


def _known(axis: Axis, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{leaf.space} = {sizes[leaf.space]}" for leaf in leaves(axis) if leaf.space in sizes)


def _unite(
    entries: Mapping[str, Entry], absent: Mapping[str, Entry], keys: list[str], config: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Which spaces share one element (norm source and target, tied axes), and which tensors are aliases."""
    parent = {key: key for key in keys}

    def top(key: str) -> str:
        while parent[key] != key:
            key = parent[key]
        return key

    for entry in entries.values():
        if entry.norm:
            parent[top(entry.norm.target)] = top(entry.norm.source)
    ties = config.get("tie_word_embeddings", True)
    tied = [entry for entry in entries.values() if ties and entry.notes.get("tied") in entries]
    for entry in (*tied, *absent.values()):
        for mine, theirs in zip(entry.axes, entries[entry.notes["tied"]].axes, strict=True):
            for a, b in zip(leaves(mine), leaves(theirs), strict=True):
                if not a.constant:
                    parent[top(a.space)] = top(b.space)
    return {key: top(key) for key in keys}, [entry.role for entry in tied]


def _kind(declared: Declared, config: Mapping[str, Any]) -> str:
    kind = next((kind for condition, kind in declared.other if _holds(condition, config)), declared.kind)
    if not kind.startswith("act "):
        return kind
    activation = str(lookup(config, kind.removeprefix("act ").split("|")))
    return {"relu": "relu", "tanh": "odd"}.get(activation, "permutation")
