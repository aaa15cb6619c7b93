# SPDX-License-Identifier: Apache-2.0
"""onebasin families"""

from __future__ import annotations

from rich.table import Table

from . import common as c


def families(json: c.Json = False) -> None:
    """List the supported families and their model types; with --json also the kinds of their spaces."""
    from onebasin.families import installed, tables

    known = {**tables(), **installed()}
    found = {
        name: {"types": table.types, "spaces": {key: space.kind for key, space in table.spaces.items() if space.part}}
        for name, table in known.items()
    }
    if json:
        c.print_json(found)
        return
    shown = Table("family", "model types")
    for name, table in known.items():
        shown.add_row(name, " ".join(table.types))
    c.stdout().print(shown)
    c.stdout().print("Other types of transformers are inferred from their classes: onebasin infer TYPE")
