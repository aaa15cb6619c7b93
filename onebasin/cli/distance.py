# SPDX-License-Identifier: Apache-2.0
"""onebasin distance"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from . import common as c


def distance(
    a: Annotated[str, typer.Argument(metavar="A", help="A model: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another model; relative distances are to its norm.")],
    family: c.Family = None,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure the Euclidean distance between the weights that A and B share: in total, per part, per layer."""
    import onebasin

    with c.progress(quiet, first="reading"):
        found = onebasin.distance(a, b, family=family)
    if json:
        c.print_json(
            {"distance": found.distance, "relative": found.relative, "parts": found.parts, "layers": found.layers}
        )
    elif quiet:
        print(f"{found.distance:.9g}")
    else:
        table = Table("", "distance")
        table.add_row("whole", f"{found.distance:.6g}  (relative {found.relative:.4g})")
        for name, value in found.parts.items():
            table.add_row(name, f"{value:.6g}")
        for name, value in found.layers.items():
            table.add_row(f"layer {name}", f"{value:.6g}")
        c.stdout().print(table)
