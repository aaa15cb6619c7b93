# SPDX-License-Identifier: Apache-2.0
"""The signature of a model, from a table and a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .axes import Leaf, leaves, nesting, rename, show, space_leaves
from .classes import Classes
from .conditions import TableError, holds, lookup, setting, settled
from .locate import Place, joined, layer_numbers, located, regex, require, role_of, same_here
from .signature import Entry, Signature, Space, bias_beside
from .sizes import Placed, solved
from .table import Declared, Line, Table, When, spelled


def resolve(table: Table, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Signature:
    """Fit a table to a checkpoint: find every tensor in it exactly once, and solve for all sizes.

    Args:
        table: The table.
        shapes: Tensor name on disk -> shape.
        config: The model's configuration as a dictionary.

    Raises:
        TableError: Tensors are unknown, missing, doubled, or of a wrong shape, or the table does not support this
            configuration.
    """
    for condition, reason in table.refused:
        if holds(condition, config):
            asked = dict.fromkeys(part.partition("=")[0].rstrip("!") for part in condition.split(","))
            given = ", ".join(f"{key} = {setting(config, key)}" for key in asked)
            raise TableError(f"{table.family}: models with {given} have no table yet: {reason}")
    table = _settled(table, config)
    entries, shapes = _kept(table, shapes)
    shapes, pieces = joined(table, shapes)
    prefix = next((p for p in table.prefixes if any(name.startswith(p) for name in shapes)), "")
    found = located(table, shapes, prefix)
    numbers = layer_numbers(table, found, config)
    require(table, found, numbers, prefix)

    found |= {role_of(line.full, where): ("", line, where) for line in table.lines if "bare" in line.notes
              for where in (numbers[line.heading] if line.heading else [()])}  # fmt: skip
    found = _in_order(table, found)
    stages = 1 + max((int(indices[0]) for _, _, indices in found.values() if indices), default=0)
    entries, placed = _entered(table, entries, found, numbers, shapes, stages)
    bare = {role: entry for role, entry in entries.items() if not entry.stored}
    entries = {role: entry for role, entry in entries.items() if entry.stored}
    sizes = solved(entries, placed, table, config)
    for entry in entries.values():
        if entry.norm:  # it may be the only tensor with this space: DeBERTa-v2 may have an unused norm of positions
            sizes.setdefault(entry.norm.source, sizes[entry.norm.target])
    for role, entry in bare.items():
        assert entry.norm is not None
        length = sizes.setdefault(entry.norm.target, sizes[entry.norm.source])
        bare[role] = replace(entry, name=role, shape=(length,))
    same = same_here(table, found)
    absent = bare | _absent(table, entries, same, placed, config, prefix)
    outside = _Block(table, "", (), None, stages, same)
    whole = [name for name, declared in table.spaces.items() if not {"layer", "stage"} & set(declared.per)]
    for entry in absent.values():  # a space that only a tied tensor has gets its size from the other tensor
        other = entries.get(entry.notes.get("tied", ""))
        for mine, theirs in zip(leaves(entry.axes), leaves(other.axes), strict=False) if other else ():
            if not mine.constant and not theirs.constant and mine.space in whole and mine.space not in placed:
                placed[mine.space] = outside.place(mine.space)
                sizes[mine.space] = sizes[theirs.space]
    root, aliases = _unite(entries, absent, list(placed), config)
    for role, entry in entries.items():
        if entry.name in pieces:
            each = pieces[entry.name]
            names = tuple(each.names[i] for i in range(len(each.names)))
            entries[role] = replace(entry, pieces=names, joint=each.joint)
    for role in aliases:
        entries[role] = replace(entries[role], alias=entries[role].notes["tied"])

    written = _written([*entries.values(), *absent.values()], root)
    batch = _batches(entries, root, placed)
    outputs = _outputs(table, [*entries.values(), *absent.values()], same, batch)
    spaces = {
        key: Space(key, at.name, sizes[key], at.declared.kind if sizes[key] and root[key] in written else "fixed",
                   at.declared.part, at.layer, batch.get(root[key], ()), key in outputs)
        for key, at in placed.items()
    }  # fmt: skip
    return Signature(table.family, entries, spaces, root, absent, table.temperature, table.eps)


def _entered(
    table: Table,
    entries: Mapping[str, Entry],
    found: Mapping[str, Place],
    numbers: Mapping[str, Mapping[tuple[str, ...], int]],
    shapes: Mapping[str, tuple[int, ...]],
    stages: int,
) -> tuple[dict[str, Entry], dict[str, Placed]]:
    """Return the entries with those of all tensors that lines were found for, without sizes, and the spaces on their
    axes, by key."""
    entries, placed = dict(entries), dict[str, Placed]()
    following = dict(zip(found, [*list(found)[1:], ""], strict=True))
    blocks: dict[tuple[str, tuple[str, ...]], _Block] = {}
    for role, (name, line, indices) in found.items():
        layer = numbers[line.heading][indices] if line.heading else None
        if (line.heading, indices) not in blocks:
            same = same_here(table, found, line.heading, indices)
            blocks[line.heading, indices] = _Block(table, line.heading, indices, layer, stages, same)
        block, norm = blocks[line.heading, indices], line.norm
        mentioned = [leaf.space for leaf in space_leaves(line.axes)] + list(norm.over if norm else ())
        here = {space: block.place(space) for space in mentioned}
        keys = {space: place.key for space, place in here.items()}
        placed |= {place.key: place for place in here.values()}
        if norm:
            over, beside = (tuple(keys[space] for space in spaces) for spaces in (norm.over, norm.beside))
            norm = replace(norm, source=keys[norm.source], target=keys[norm.target], over=over, beside=beside)
        stated = {note.word: note.text for note in line.clauses if all(of.of(layer) is not False for of in note.when)}
        notes = {**_implied(stated, line, here), **stated}
        for word in {"scales", "degree", "constant", "against"} & notes.keys():  # in the same block
            block_name = role_of(line.heading, indices) + "." if line.heading else ""
            words = notes[word].split()
            notes[word] = " ".join(other if other.isdigit() else block_name + other for other in words)
        if "bare" in notes:
            notes["bare"] = following[role]
        entries[role] = Entry(role, name, tuple(shapes.get(name, ())), tuple(rename(axis, keys) for axis in line.axes),
                              layer, norm, None, line.head, notes, stored="bare" not in notes)  # fmt: skip

    for role, entry in entries.items():
        bias = entries.get(bias_beside(role))
        if bias and entry.norm and entry.norm.writes_back and not entry.head and "stays" not in bias.notes:
            place = placed[entry.norm.source]
            if "post-norm" in place.declared.properties:
                entries[bias.role] = replace(bias, notes={**bias.notes, "passes": place.name})
    return entries, placed


def _settled(table: Table, config: Mapping[str, Any]) -> Table:
    """Return the table with the declarations, lines and notes that hold for a config, and conditions on layers and
    tensors."""
    lines = []
    for line in table.lines:
        if (when := settled(line.when, config)) is not None:
            notes = ((note, settled(note.when, config)) for note in line.clauses)
            clauses = tuple(replace(note, when=left) for note, left in notes if left is not None)
            lines.append(replace(line, when=when, clauses=clauses, notes={note.word: note.text for note in clauses}))
    spaces = {}
    for name, declared in table.spaces.items():
        some: list[tuple[When, Declared]] = []  # for some layers
        for when, other in declared.other:
            left = settled(when, config)
            if left:
                some.append((left, replace(other, kind=_kind(other, config))))
            elif left is not None:
                declared, some = other, []
        spaces[name] = replace(declared, kind=_kind(declared, config), other=tuple(some))
    same = [(name, other, still) for name, other, when in table.same if (still := settled(when, config)) is not None]
    return replace(table, lines=lines, spaces=spaces, same=same)


@dataclass
class _Block:
    """The meaning of the names of spaces in a layer, or outside of all. same: spaces that others replace here."""

    table: Table
    heading: str
    indices: tuple[str, ...]
    layer: int | None
    stages: int
    same: Mapping[str, str]
    places: dict[str, Placed] = field(default_factory=dict)

    def place(self, space: str) -> Placed:
        if space in self.places:
            return self.places[space]
        word, _, which = self.same.get(space, space).partition(".")
        declared, stage = self.table.spaces[word], int(self.indices[0]) if self.indices else 0
        key, layer = word, None
        if "stage" in declared.per:
            stage = {"": stage, "next": stage + 1, "first": 0, "last": self.stages - 1}[which]
            key = f"{word}.{stage}"
        elif "layer" in declared.per and self.heading:
            key, layer = f"{role_of(self.heading, self.indices)}.{word}", self.layer
        for when, other in declared.other:
            declared = other if all(of.of(layer) for of in when) else declared
        per = frozenset(self.place(outer).key for outer in declared.per if outer not in ("layer", "stage"))
        self.places[space] = found = Placed(key, word, declared, layer, stage, per)
        return found


def _implied(stated: Mapping[str, str], line: Line, here: Mapping[str, Placed]) -> dict[str, str]:
    """Return the notes `passes` and `invisible` of a constant, or of a weight that computes one: they are properties of
    the space of the constant."""
    if "stays" in stated or (len(line.axes) > 1 and not spelled(line.pattern).endswith("weight")):
        return {}
    found = {}
    for leaf in leaves(line.axes):
        for word in here[leaf.space].declared.properties if not leaf.constant else ():
            if word != "post-norm" and leaf.dual == (word == "invisible"):
                found[word] = here[leaf.space].name + "'" * leaf.dual
    return found


def _batches(
    entries: Mapping[str, Entry], root: Mapping[str, str], placed: Mapping[str, Placed]
) -> dict[str, tuple[str, ...]]:
    """Return the batch of every root space: the spaces that it is `per` and that precede it, on its axis or an earlier
    one.

    A grouped convolution `(band inside) inside'` reads the band that it writes. The weights of norms are not
    considered: with one weight for all heads, each head still has its own signs.
    """
    per = {key: {root[outer] for outer in placed[root[key]].per if outer in root} for key in placed}
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries.values():
        before: tuple[str, ...] = ()
        for axis in entry.axes if entry.norm is None else ():
            for leaf, outer in nesting((axis,)):
                if not leaf.constant:
                    key = root[leaf.space]
                    here = tuple(
                        root[name] for name in dict.fromkeys((*before, *outer)) if root[name] in per[leaf.space]
                    )
                    if found.setdefault(key, here) != here:
                        apart = " and ".join(placed[one].name for one in sorted({*found[key]} ^ {*here}))
                        where = "this tensor" if len(here) > len(found[key]) else "other tensors"
                        raise TableError(f"'{entry.name}': '{placed[key].name}' is per {apart} in {where} alone")
            before += tuple(leaf.space for leaf in space_leaves(axis))
    return found


def _kept(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Entry], dict[str, tuple[int, ...]]]:
    """Return entries with fixed axes for the tensors that are `still`, and the shapes of all others."""
    entries, rest = {}, {}
    for name, shape in shapes.items():
        found = next(((p, match) for p in table.still if (match := regex(p).match(name))), None)
        if found is None:
            rest[name] = tuple(shape)
            continue
        role = role_of(found[0], ()) + name[found[1].end() :]
        entries[role] = Entry(role, name, tuple(shape), tuple(Leaf(str(length)) for length in shape))
    return entries, rest


def _in_order(table: Table, found: Mapping[str, Place]) -> dict[str, Place]:
    """Sort tensors by the order of execution, which is that of the table: by blocks, then layers, then lines. Blocks
    with the same beginning of their names alternate, stage by stage."""
    ranks = dict[int, tuple[int, int, int]]()  # lines -> the places of the first such block, of the block, of the line
    start, section, before = 0, 0, ""
    for number, line in enumerate(table.lines):
        if line.heading != before:
            section = number
        if line.heading.partition("{}")[0] != before.partition("{}")[0]:
            start = number
        before = line.heading
        ranks[id(line)] = start, section, number

    def key(item: tuple[str, Place]) -> tuple[Any, ...]:
        _, (_, line, indices) = item
        start, section, number = ranks[id(line)]
        where = tuple(map(int, indices))
        return start, where[:1], section, where, number

    return dict(sorted(found.items(), key=key))


def _absent(
    table: Table,
    entries: Mapping[str, Entry],
    same: Mapping[str, str],
    declared: Collection[str],
    config: Mapping[str, Any],
    prefix: str,
) -> dict[str, Entry]:
    """Return the tied tensors that the file omits, since it stores their numbers under another name: of a head, or
    `beside` the tensor that they are tied to (the encoder's embedding beside the decoder's).

    A weight exists if its bias is stored, under this or another name, and a bias if its weight is. A weight without
    either exists if the model has a head (its names have a prefix, or its architecture says so), the config ties, and
    no other tensor reads the space that it would read, or only those `beside` it.
    """
    architectures = [str(item) for item in config.get("architectures") or ()]
    headed = bool(prefix) or any("For" in item or "Head" in item for item in architectures)
    ties = headed and config.get("tie_word_embeddings", True)
    unread = set(declared) - {leaf.space for entry in entries.values() for leaf in leaves(entry.axes) if leaf.dual}
    beside = {role for entry in entries.values() for note in ("beside", "biases")
              for role in entry.notes.get(note, "").split()}  # fmt: skip
    biases = {line.full for line in table.lines
              if line.full.endswith("bias") and line.notes.get("tied", "") in entries}  # fmt: skip
    found: dict[str, Entry] = {}
    for line in table.lines:
        other = entries.get(line.notes.get("tied", ""))
        role = role_of(line.full, ()) if "{}" not in line.full else ""
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
            or (not headed and {role, sibling} & biases)
            or (ties and reads and (reads <= unread or role in beside))
        ):
            name = role if line.head else prefix + role
            found[role] = Entry(role, name, other.shape, axes, None, None, other.role, line.head, line.notes, False)
    return found


def _outputs(
    table: Table, entries: list[Entry], same: Mapping[str, str], batch: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the spaces of the model's outputs: nothing reads them, or only a head would, and there is none."""
    inner = {name for entry in entries for _, outer in nesting(entry.axes) for name in outer}
    inner |= {name for outer in batch.values() for name in outer}
    written = {leaf.space for entry in entries for leaf in leaves(entry.axes)}
    found = written - inner - _read(entries)
    if not any(entry.head for entry in entries):
        heads = [line for line in table.lines if line.head]
        read = {leaf.space for line in heads for leaf in leaves(line.axes) if leaf.dual}
        read |= {line.norm.source for line in heads if line.norm}  # BEiT returns its stream; a head normalizes it
        found |= {same.get(space, space) for space in read}
    around = (outer for entry in entries for axis in entry.axes if not any(leaf.dual for leaf in leaves((axis,)))
              for leaf, outer in nesting((axis,)) if leaf.space in found)  # fmt: skip
    return found.union(*around)


def _written(entries: Collection[Entry], root: Mapping[str, str]) -> set[str]:
    """Return the roots of the spaces that tensors write. Inputs of the model are only read."""
    return {root[leaf.space] for entry in entries for leaf in space_leaves(entry.axes) if not leaf.dual}


def _read(entries: Collection[Entry]) -> set[str]:
    """Return the spaces that a tensor or a norm reads."""
    found = {leaf.space for entry in entries for leaf in leaves(entry.axes) if leaf.dual}
    return found | {entry.norm.source for entry in entries if entry.norm}


def _unite(
    entries: Mapping[str, Entry], absent: Mapping[str, Entry], keys: list[str], config: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return the root of every space (norm source and target, and tied axes, share one), and the roles of aliases."""
    known, classes = set(keys), Classes(keys)
    for entry in absent.values():
        lost = next((leaf.space for leaf in space_leaves(entry.axes) if leaf.space not in known), None)
        if lost:
            raise TableError(f"'{entry.role}' has an axis in '{lost}', which no stored tensor has")
    for entry in (*entries.values(), *absent.values()):
        if entry.norm:
            classes.join(entry.norm.source, entry.norm.target)
    ties = config.get("tie_word_embeddings", True)
    tied = [entry for entry in entries.values() if ties and entry.notes.get("tied") in entries]
    for entry in (*tied, *(entry for entry in absent.values() if "tied" in entry.notes)):
        other = entries[entry.notes["tied"]]
        mine, theirs = ([leaves(axis) for axis in one.axes] for one in (entry, other))
        if list(map(len, mine)) != list(map(len, theirs)):
            raise TableError(f"'{entry.role}' has the axes '{show(entry.axes)}', and '{other.role}', to which it is "
                             f"tied, has '{show(other.axes)}'")  # fmt: skip
        for a, b in zip(leaves(entry.axes), leaves(other.axes), strict=True):
            if not a.constant:
                classes.join(b.space, a.space)
    return {key: classes.find(key) for key in keys}, [entry.role for entry in tied]


def _kind(declared: Declared, config: Mapping[str, Any]) -> str:
    if not declared.kind.startswith("act "):
        return declared.kind
    activation = str(lookup(config, declared.kind.removeprefix("act ").split("|")))
    return {"relu": "relu", "tanh": "odd"}.get(activation, "permutation")
