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
                                          rounds down, `even a` up to an even number, `a.b` looks inside, `a when
                                          KEY=VALUE` asks first

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
function's name from the config (relu -> relu, tanh -> odd, else permutation). A space that stands before others inside
parentheses is at most permuted. Spaces that occur only as the target of a norm need no declaration. `ignore PATTERN`
names buffers that hold no parameters.

`experts.{expert}.w1.weight  (expert ffn) mlp_in'` stands for a tensor of every expert, joined along the axis in
which `expert` stands, before all but what groups experts. `rmsnorm: qk -> qk` normalizes inside every head, with one
weight for all heads; `rmsnorm: (head qk) -> (head qk)` all heads at once; `layernorm: [rot | pass] -> (head [rot |
pass])` inside every head, with a weight for each; `layernorm: (4 stream) -> (4 merged)` four vectors side by side as
one. A part of a concatenated axis may be empty.

Notes after `;`
    tied ROLE            holds the same numbers as ROLE when the config ties embeddings
    part NAME            counts to this part of the model (for a bias whose axes do not say)
    when KEY=VALUE, ...  the line holds only for such configs (`!=` for all others; for a list: a part of an item)
    from N, until N      the first N layers lack this tensor, or no others have it (a number, or a config key); lines of
                         one name may share the layers between them
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
    batch ROLE           with the `.bias`, `.running_mean` and `.running_var` beside it a batch norm, which ROLE reads
    glu                  a convolution over time, between zeros; one half of its channels is multiplied by the sigmoid
                         of the other
    bare                 this norm has no numbers, so no file holds a tensor of this name
    scales NAME ...      multiplies channel by channel what these tensors of its block write (LayerScale)
    padded               zeros may stand beside what this norm puts out, so its bias cannot move into what reads it

The lines stand in the order of execution: a tensor's place among the norms says which of them its output meets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .axes import Axis, Flat, Leaf, leaves, nesting, parse, show
from .signature import MOVES, Norm


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
    norm: Norm | None  # of spaces as the table names them
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
          "constant", "against", "idle", "unscaled", "instead", "bare", "batch", "glu"}  # fmt: skip


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
    elif words and f"{kind} {words[0]}" in MOVES:
        kind = f"{kind} {words.pop(0)}"
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
    through = _through(norm[1], parse(norm[2]), axes) if norm else None
    absolute = head or name.startswith("/")
    pattern = name.removesuffix("?").removeprefix("/")
    return Line(pattern, name.endswith("?"), axes, through, notes, heading, head, absolute)


def _through(kind: str, source: tuple[Axis, ...], target: tuple[Axis, ...]) -> Norm:
    """A norm of what stands on the last axis of `source`."""
    over = [leaf.space for leaf in leaves(source[-1:]) if not leaf.constant]
    around = {space for _, outer in nesting(source) for space in outer}
    beside = tuple(space for space in over[:-1] if space not in around)
    if beside and source[-1] not in (target[-1], *getattr(target[-1], "parts", ())):
        raise TableError("a norm of several parts side by side writes back into them")
    first = target[0].parts[0] if isinstance(target[0], Flat) else target[0]
    copies = int(first.space) if isinstance(first, Leaf) and first.constant else 1
    return Norm(kind, over[-1], [leaf.space for leaf in leaves(target)][-1], copies, tuple(over), beside)


def _declare_norm_targets(table: Table, origin: str) -> None:
    """A space that is only ever the target of a norm is linear, and per layer where its norm is."""
    for line in table.lines:
        if line.norm and line.norm.target.partition(".")[0] not in table.spaces:
            table.spaces[line.norm.target] = Declared("linear", "", bool(line.heading))
    for line in table.lines:
        for leaf in leaves(line.axes):
            name, _, which = leaf.space.partition(".")
            where = f"{origin}: '{line.full}  {show(line.axes)}'"
            if not leaf.constant and name not in table.spaces:
                raise TableError(f"{where} names the undeclared space '{name}'")
            known = ("first", "last", *(["next", ""] if line.heading else []))
            if not leaf.constant and which not in (known if table.spaces[name].per_stage else ("",)):
                raise TableError(f"{where}: '{leaf.space}' is of no stage here; see 'stage'")
