# SPDX-License-Identifier: Apache-2.0
"""onebasin families"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from onebasin.families import tables

from . import common as c


def families(json: c.Json = False) -> None:
    """List the supported families and the symmetries of their spaces."""
    found = [
        {
            "family": table.family,
            "types": table.types,
            "spaces": {name: space.kind for name, space in table.spaces.items() if space.part},
        }
        for table in tables().values()
    ]
    if json:
        c.print_json(found)
        return
    shown = Table("family", "model types", "spaces that move (and what nonlinearity allows)")
    for item in found:
        spaces = ", ".join(f"{name}: {kind}" for name, kind in item["spaces"].items())  # type: ignore[attr-defined]
        shown.add_row(str(item["family"]), " ".join(item["types"]), spaces)
    Console().print(shown)
