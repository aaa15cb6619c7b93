# SPDX-License-Identifier: Apache-2.0
"""onebasin statistics"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onebasin.data.calibration import Calibration
from onebasin.fusion.fisher import Fisher
from onebasin.jobs.statistics import KINDS
from onebasin.jobs.statistics import statistics as measure

from . import common as c
from . import matching as m
from .fields import options_of


@c.takes(options_of(Fisher, without=("statistics", "eps", "normalize")), "fisher", dict)
@c.takes(options_of(Calibration, without=("noise",)), "calibration", m.on_data)
def statistics(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to measure: a folder or a hub id.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The file to write.")],
    kind: Annotated[str, typer.Option(**c.choice(*KINDS), help=f"What to measure: {', '.join(KINDS)}.")] = "fisher",
    canonical: Annotated[
        bool,
        typer.Option("--canonical", help="Measure the canonical form, for levels that move the residual stream."),
    ] = False,
    *,
    calibration: dict[str, Any],
    fisher: dict[str, Any],
    precision: c.Precision = "float32",
    device: c.Device = "cpu",
    family: c.Family = None,
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure the statistics of a model on data that fisher and regmean need, and save them in a file."""
    with c.progress(quiet) as tell:
        result = measure(
            model, output, kind, canonical=canonical, family=family, overwrite=overwrite, tell=tell,
            **{"precision": precision, "device": device, **calibration, **fisher},
        )  # fmt: skip
    if c.wants_words(result, json, quiet):
        print(f"{result['output']}: {kind} of {result['tensors']} tensors, over {result['samples']} examples")
