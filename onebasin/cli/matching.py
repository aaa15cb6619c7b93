# SPDX-License-Identifier: Apache-2.0
"""The options of the commands that match and write models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onebasin.data.calibration import Calibration
from onebasin.jobs.options import Options
from onebasin.settings import OutputSettings

from . import common as c
from .fields import options_of, typed

Layers = Annotated[str | None, typer.Option(help="Move only these layers, such as 0-4,11 [default: all].")]
BestLayers = Annotated[
    str | None,
    typer.Option(
        help="Move only these layers, such as 0-4,11 [default: all]; auto: the single layer, or all, with which the "
        "merged model does best on --validation."
    ),
]

OPTIONS = {
    **options_of(Options, without=("symmetry", "layers", "family")),
    "family": (c.Family, None),
    "dtype": (c.Dtype, None),
    "verify": (c.Verify, "outputs"),
    "no_verify": (c.NoVerify, False),
    "overwrite": (c.Overwrite, False),
}
WRITTEN = options_of(OutputSettings)


def on_data(given: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of calibration data to the arguments of the jobs."""
    return typed(Calibration, given)


def _matching(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: given[name] for name in Options.names() if name in given}
    rest = {name: value for name, value in given.items() if name not in own}
    rest["verify"] = "none" if rest.pop("no_verify") else rest["verify"]
    return {**typed(Options, own), **rest}


matches = c.takes(OPTIONS, "matching", _matching)
writes = c.takes(WRITTEN, "written", lambda given: typed(OutputSettings, given))
