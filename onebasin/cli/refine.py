# SPDX-License-Identifier: Apache-2.0
"""onebasin refine"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onebasin.data.calibration import Calibration
from onebasin.fusion.refine import Refining
from onebasin.jobs.refine import DATA

from . import common as c
from . import matching as m
from .fields import options_of, typed


@c.takes(options_of(Refining, without=("seed",)), "how", lambda given: typed(Refining, given))
@c.takes(options_of(Calibration, without=("noise",), defaults=DATA), "calibration", m.on_data)
def refine(
    merged: Annotated[str, typer.Argument(metavar="MERGED", help="The merged model: a folder or a hub id.")],
    teachers: Annotated[
        list[str], typer.Option("--teachers", help="A model that MERGED was made from. Repeat for each.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder to write.")],
    *,
    calibration: dict[str, Any],
    how: dict[str, Any],
    control: Annotated[
        str | None,
        typer.Option(help="Another start, such as an unmatched average, to train in the same way for comparison."),
    ] = None,
    dtype: c.Dtype = None,
    device: c.Device = "cpu",
    family: c.Family = None,
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Distil the models that MERGED was made from into it, for some steps. This is training, not alignment."""
    import onebasin

    with c.progress(quiet) as tell:
        result = onebasin.refine(
            merged, teachers, output, control=control, dtype=dtype, device=device, family=family, overwrite=overwrite,
            tell=tell, command=c.command_line(), **how, **calibration,
        )  # fmt: skip
    if c.wants_words(result, json, quiet):
        other = result["control"]
        for name, row in [(merged, result), *([(other["model"], other)] if other else [])]:
            print(f"{name}: KL divergence from the teachers {row['loss_before']:.6g} -> {row['loss_after']:.6g}")
        print(f"{result['output']}: distilled, {result['step']} of {result['steps']} steps")
