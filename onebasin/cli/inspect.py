# SPDX-License-Identifier: Apache-2.0
"""onebasin inspect"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column, Table

from . import common as c


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model: a folder or a hub id.")],
    symmetry: Annotated[str, c.level(f"Level at which to name the groups: {c.LEVELS}.")] = "full",
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor with its axes.")] = False,
    family: c.Family = None,
    json: c.Json = False,
) -> None:
    """Show the spaces of a model and the groups that act on them."""
    from onebasin.jobs.folders import opened
    from onebasin.symmetry import acting_groups
    from onebasin.symmetry.tables.axes import show

    with opened([model], family) as (checkpoint,):
        signature = checkpoint.signature
    groups = acting_groups(signature, symmetry, rescale="joint")
    spaces = []
    for root, keys in signature.members.items():
        space, group = signature.spaces[root], groups.get(root)
        copies = 1
        for outer in space.batch:
            copies *= signature.sizes[outer]
        spaces.append({
            "space": root,
            "also": [key for key in keys if key != root],
            "size": space.size,
            "copies": copies,
            "kind": signature.kinds[root],
            "group": group.name if group else "fixed",
            "dimension": copies * group.dimension(space.size) if group else 0,
            "tensors": signature.touching[root],
        })  # fmt: skip
    total = sum(int(str(row["dimension"])) for row in spaces)
    facts = {"model": model, "family": signature.family, "tensors": len(signature.tensors), "symmetry": symmetry,
             "dimension": total, "spaces": spaces}  # fmt: skip
    if json:
        facts["axes"] = {role: show(entry.axes) for role, entry in signature.tensors.items()}
        c.print_json(facts)
        return
    console = c.stdout()
    console.print(f"{model}: {signature.family}, {len(signature.tensors)} tensors, {len(signature.layers)} layers")
    table = Table(Column("space", no_wrap=True), "size", "copies", "group", "dimension", "tensors")
    alike: dict[tuple[str, ...], list[str]] = {}  # contents of a row -> its spaces, in all layers
    for row in spaces:
        name = str(row["space"])
        if row["group"] != "fixed" or not signature.spaces[name].layer:
            cells = [str(row[key]) for key in ("size", "copies", "group", "dimension")]
            kind = "" if signature.spaces[name].layer is None else name.rpartition(".")[2]
            alike.setdefault((kind, *cells, str(len(signature.touching[name]))), []).append(name)
    for (_, *cells), names in alike.items():
        first, last = (f".{signature.spaces[name].layer}" for name in (names[0], names[-1]))
        table.add_row(names[0] if first == last else names[0].replace(first, f"{first}-{last[1:]}", 1), *cells)
    console.print(table)
    console.print(f"continuous symmetries at level {symmetry}: {total} dimensions")
    if tensors:  # plain lines, which are not cut to the width of the terminal
        width = max(len(entry.name) for entry in signature.tensors.values())
        for entry in signature.tensors.values():
            print(f"{entry.name:{width}}  {entry.shape!s:20}  {show(entry.axes)}")
