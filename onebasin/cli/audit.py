# SPDX-License-Identifier: Apache-2.0
"""onebasin audit"""

from __future__ import annotations

import json as parser
from typing import Annotated, Any

import typer

from . import common as c

SHOWN = 8  # tensors of a set at most

Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE: a value in the configuration of the family's tiny model. Repeatable."),
]


def audit(
    target: Annotated[str, typer.Argument(metavar="FAMILY|MODEL", help="A family, a model type, or a small model.")],
    settings: Setting = None,
    family: c.Family = None,
    seed: Annotated[int, typer.Option(help="Seed of the random parameters and inputs.")] = 0,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Check that the table has all continuous symmetries. Compares their dimension with that of the directions in
    parameter space that leave all outputs unchanged. Only the architecture matters: all parameters are drawn at random,
    a FAMILY is audited on a tiny model, and a MODEL must be small. Lists the smallest sets of tensors that hold what is
    missing. Exit code 1 if the dimensions differ."""
    from onebasin.studies.audit import audit as run

    with c.progress(quiet, first=f"Jacobian of '{target}'"):
        found = run(target, family=family, seed=seed, **_settings(settings))
    if json:
        measured = {name: value for name, value in vars(found).items() if name != "find"}
        c.print_json({"target": target, **measured, "missing": found.missing, "complete": found.complete})
    elif not quiet:
        kept, lost = found.gap
        print(
            f"{target}: {found.parameters:,} parameters, rank {found.rank:,}\n"
            f"flat directions       {found.nullity}\n"
            f"generated symmetries  {found.dimension}\n"
            f"spectral gap          {kept:.1e} above, {lost:.1e} below\n"
            f"largest output change {found.largest_change:.1e} along a generated direction"
        )
        for roles, count in found.missing:
            rest = f" and {len(roles) - SHOWN} more" if len(roles) > SHOWN else ""
            print(f"missing               {count} in {', '.join(roles[:SHOWN])}{rest}")
    if not found.complete:
        raise typer.Exit(1)


def _settings(items: list[str] | None) -> dict[str, Any]:
    """`["hidden_size=8"]` -> {"hidden_size": 8}; a value that is not JSON stays text. Raises ValueError without `=`."""
    found: dict[str, Any] = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise ValueError(f"--set '{item}': write NAME=VALUE")
        try:
            found[name] = parser.loads(value)
        except ValueError:
            found[name] = value
    return found
