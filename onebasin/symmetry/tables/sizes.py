# SPDX-License-Identifier: Apache-2.0
"""The sizes of spaces, from numbers in the configuration and the tensors' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .axes import Axis, leaves, show, size, space_leaves
from .conditions import OtherSizes, TableError, lookup
from .signature import Entry
from .table import Declared, Table


@dataclass(frozen=True)
class Placed:
    """A space of the model: its key, its name and declaration in the table, its layer and its stage.

    per: the spaces for each of whose entries it may have its own map.
    """

    key: str
    name: str
    declared: Declared
    layer: int | None
    stage: int
    per: frozenset[str]


def solved(
    entries: Mapping[str, Entry],
    placed: Mapping[str, Placed],
    table: Table,
    config: Mapping[str, Any],
) -> dict[str, int]:
    """Return the sizes of all spaces. Raises TableError if shapes contradict them or do not determine them."""
    sizes: dict[str, int] = {}
    for key, place in placed.items():
        if place.declared.kind == "factor":
            sizes[key] = 1
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
            unknown = {leaf.space for leaf in space_leaves(axis) if leaf.space not in sizes}
            if len(unknown) > 1:
                waiting.append((entry, axis, length))
                continue
            progress = True
            if unknown:  # an axis's size is linear in the one unknown: size = a + b * unknown
                name = unknown.pop()
                a = size(axis, {**sizes, name: 0})
                b = size(axis, {**sizes, name: 1}) - a
                value, remainder = divmod(length - a, b)
                if remainder or value < (0 if a else 1):  # it may be 0 if the axis has other parts
                    raise OtherSizes(
                        f"'{entry.name}' has shape {entry.shape}: {length} does not split into '{show((axis,))}' "
                        f"with {_known(axis, sizes)}",
                        _names(axis, placed),
                    )
                sizes[name] = value
            elif size(axis, sizes) != length:
                raise OtherSizes(
                    f"'{entry.name}' has shape {entry.shape}: '{show((axis,))}' should be {size(axis, sizes)}, "
                    f"not {length}",
                    _names(axis, placed),
                )
        open_axes = waiting
    if open_axes:
        entry, axis, _ = open_axes[0]
        raise TableError(f"'{entry.name}': shapes do not determine the sizes in '{show((axis,))}'; add a 'size' line")
    return sizes


def _names(axis: Axis, placed: Mapping[str, Placed]) -> frozenset[str]:
    return frozenset(placed[leaf.space].name for leaf in space_leaves(axis))


def _known(axis: Axis, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{leaf.space} = {sizes[leaf.space]}" for leaf in leaves(axis) if leaf.space in sizes)
