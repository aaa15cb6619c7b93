# SPDX-License-Identifier: Apache-2.0
"""The assignment of a checkpoint's tensors to lines of a table and to layers."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from .axes import leaves
from .conditions import OtherTensors, TableError, lookup
from .table import Line, Table, spelled

Place = tuple[str, Line, tuple[str, ...]]  # name on disk, line, indices


@cache
def regex(pattern: str) -> re.Pattern[str]:
    """Return a regex for a pattern such as `h.{}.{weight|gamma}`, with a group for every layer index."""
    out = ""
    for piece in re.split(r"(\{[^}]*\})", pattern):
        if piece == "{}":
            out += r"(\d+)"
        elif "|" in piece:
            out += "(?:" + "|".join(map(re.escape, piece[1:-1].split("|"))) + ")"
        else:
            out += re.escape(piece)
    return re.compile(out)


def role_of(pattern: str, indices: tuple[str, ...]) -> str:
    """Return the first spelling of a pattern, with its layer indices filled in."""
    if not indices:
        return spelled(pattern)
    first, *others = spelled(pattern).split("{}")
    return first + "".join(index + other for index, other in zip(indices, others, strict=True))


@dataclass
class Pieces:
    """The tensors of one line that differ in an index, by that index."""

    joint: int
    names: dict[int, str] = field(default_factory=dict)


def joined(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], dict[str, Pieces]]:
    """Return the shapes with the tensors of all experts joined into one, with `{expert}` for their index in its name,
    and the tensors that were joined.

    Raises TableError if an index is missing, or if shapes differ.
    """
    indexed = [(line, found[1]) for line in table.lines if (found := re.search(r"\{(\w+)\}", line.full))]
    choices, joints = [], dict[str, tuple[str, int]]()  # group of the index in a name -> its word, and the joint axis
    for line, word in indexed:
        before, after = (regex(part).pattern.replace(r"(\d+)", r"\d+") for part in line.full.split("{" + word + "}"))
        joint = next(i for i, axis in enumerate(line.axes) if word in (leaf.space for leaf in leaves(axis)))
        joints[group := f"index{len(joints)}"] = word, joint
        choices.append(f"{before}(?P<{group}>\\d+){after}")
    prefixes = "|".join(map(re.escape, [*table.prefixes, ""]))
    matcher = re.compile(f"(?:{prefixes})(?:{'|'.join(choices)})")  # one for all lines, since there are many names
    whole: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, Pieces] = {}
    for name, shape in shapes.items():
        match = matcher.fullmatch(name) if choices else None
        if match is None or match.lastgroup is None:
            whole[name] = tuple(shape)
            continue
        (word, joint), (start, end) = joints[match.lastgroup], match.span(match.lastgroup)
        key = f"{name[:start]}{{{word}}}{name[end:]}"
        pieces.setdefault(key, Pieces(joint)).names[int(match[match.lastgroup])] = name
    for key, each in pieces.items():
        names, joint = each.names, each.joint
        one = tuple(shapes[names[min(names)]])
        odd = next((name for name in names.values() if tuple(shapes[name]) != one), None)
        if odd is not None or set(names) != set(range(len(names))):
            raise TableError(f"the tensors '{key}' are not numbered from 0 without gaps" if odd is None else
                             f"'{odd}' has shape {tuple(shapes[odd])}, others of '{key}' have {one}")  # fmt: skip
        whole[key] = (*one[:joint], len(names) * one[joint], *one[joint + 1 :])
    return whole, pieces


def located(table: Table, shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Place]:
    """Return role -> (name on disk, line, layer indices) for every tensor."""
    lines = [line for line in table.lines if "bare" not in line.notes]
    patterns = {number for number, line in enumerate(lines) if "{" in line.full}
    plain: dict[str, set[int]] = {}  # these are looked up by their names
    for number in set(range(len(lines))) - patterns:
        plain.setdefault(lines[number].full, set()).add(number)
    ignored = [regex(pattern) for pattern in table.ignored]
    found: dict[str, Place] = {}
    unknown = []
    for name in shapes:
        bare = name.removeprefix(prefix)
        if any(pattern.fullmatch(bare) for pattern in ignored):
            continue
        fits = [
            (line, match.groups())
            for line in (lines[number] for number in sorted(patterns.union(plain.get(bare, ()), plain.get(name, ()))))
            if (line.absolute or not prefix or bare != name)  # outside the base model, only a head's
            and (match := regex(line.full).fullmatch(name if line.absolute else bare))
        ]
        if not fits:
            unknown.append(name)
            continue
        line, where = next((fit for fit in fits if not _lacks(*fit)), fits[0])
        role = role_of(line.full, where)
        if role in found:
            raise TableError(f"'{found[role][0]}' and '{name}' are spellings of one tensor; remove one of them")
        found[role] = (name, line, where)
    if unknown:
        raise OtherTensors(f"{table.family}: the table does not know {some_of(unknown)}")
    return found


def layer_numbers(
    table: Table, found: Mapping[str, Place], config: Mapping[str, Any]
) -> dict[str, dict[tuple[str, ...], int]]:
    """Return for every `layer` block: its index tuples in order -> layer number."""
    numbers: dict[str, dict[tuple[str, ...], int]] = {}
    for heading in dict.fromkeys(line.heading for line in table.lines if line.heading):
        indices = {where for _, line, where in found.values() if line.heading == heading}
        ordered = sorted(indices, key=lambda where: tuple(map(int, where)))
        numbers[heading] = {where: number for number, where in enumerate(ordered)}
    counted: int | None = 1 if table.layers else None
    for keys in table.layers:
        each = lookup(config, keys)
        stages = each if isinstance(each, (list, tuple)) else [each]  # Swin: layers of each stage
        if each is not None and not all(isinstance(stage, int) for stage in stages):
            raise TableError(f"'{' or '.join(keys)}' (number of layers) is not an integer in the config")
        counted = None if each is None or counted is None else counted * sum(stages)
    first = next(iter(numbers), None)
    if counted is not None and first is not None and len(numbers[first]) != counted:
        raise TableError(f"the config has {counted} layers, the weights have {len(numbers[first])}")
    return numbers


def require(
    table: Table,
    found: Mapping[str, Place],
    numbers: Mapping[str, Mapping[tuple[str, ...], int]],
    prefix: str,
) -> None:
    """Raise TableError unless all required tensors exist, and optional ones exist in all layers or in none."""
    early = [name for name, line, where in found.values() if _lacks(line, where)]
    if early:
        raise OtherTensors(f"{table.family}: the table has {some_of(early)} only in other layers")
    missing = []
    for line in table.lines:
        if line.head or "bare" in line.notes:
            continue
        where = numbers[line.heading] if line.heading else [()]
        other = {i for i in where if line.when and _excluded(table, found, line, i)}
        both = next((role for i in other if (role := role_of(line.full, i)) in found), None)
        if both:
            named = next(name for asked in line.when for name in asked.lacking)
            raise TableError(f"{table.family}: a layer has either '{both}' or '{named}', not both")
        roles = [role_of(line.full, i) for i in where if not _lacks(line, i) and i not in other]
        absent = [role if line.absolute else prefix + role for role in roles if role not in found]
        if not line.optional or (len(absent) < len(roles) and not line.scattered):
            missing += absent
    if missing:
        raise OtherTensors(f"{table.family}: the weights lack {some_of(missing)}")


def _excluded(table: Table, found: Container[str], line: Line, indices: tuple[str, ...]) -> bool:
    """Return whether the layer has other tensors instead of this line's."""
    lacks = partial(lacking, table, found, line.heading, indices)
    return any(asked.of(lacks=lacks) is False for asked in line.when)


def _lacks(line: Line, indices: tuple[str, ...]) -> bool:
    """Return whether the conditions of a line exclude this layer."""
    return bool(indices) and any(asked.of(layer=int(indices[-1])) is False for asked in line.when)


def lacking(table: Table, found: Container[str], heading: str, indices: tuple[str, ...], name: str) -> bool:
    """Return whether a tensor of the table, in this block or outside of blocks, is absent."""
    if heading and f"{spelled(heading)}.{name}" in table.names:
        return role_of(f"{heading}.{name}", indices) not in found
    return name in table.names and role_of(name, ()) not in found


def same_here(table: Table, found: Container[str], heading: str = "", indices: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the spaces that are replaced by others in this block, by lines `A = B`."""
    lacks = partial(lacking, table, found, heading, indices)
    layer = int(indices[-1]) if indices else None
    same = {a: b for a, b, when in table.same if all(asked.of(layer, lacks) for asked in when)}
    return {a: _last(same, b) for a, b in same.items()}


def _last(same: Mapping[str, str], space: str) -> str:
    return _last(same, same[space]) if space in same else space


def some_of(names: Sequence[str]) -> str:
    """Return up to five names as text, and the number of the others."""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
