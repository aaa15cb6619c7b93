# SPDX-License-Identifier: Apache-2.0
"""onebasin infer"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from . import common as c

READING = """\
# Each tensor is listed with the spaces of its axes, and each space with the maps that may act on it ('fixed': none).
# The notation is described in docs/notation.md of onebasin. Use the table with --family FILE.
"""


def infer(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model (a folder or a hub id), or a type or class of transformers."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the table there, for --family FILE.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    json: c.Json = False,
) -> None:
    """Infer a model's table of symmetries from its class, test it on tiny models of that class, and print it."""
    from transformers import CONFIG_MAPPING

    from onebasin.jobs.folders import placed
    from onebasin.models import Folder, ModelError
    from onebasin.running import inference
    from onebasin.running.classes import neither_folder_nor_type, type_of_class

    if output is not None and output.exists() and not overwrite:
        raise ModelError(f"'{output}' exists; give another name, or --overwrite")
    if "/" in model or Path(model.partition("+")[0]).exists():
        with TemporaryDirectory() as temporary:
            folder = Folder(placed(model, Path(temporary) / "model")[0])
            found = inference.of_config(folder.raw_config)
        c.print_notes({"notes": folder.notes}, quiet=False)
    elif model in CONFIG_MAPPING:
        found = inference.infer(model)
    elif kind := type_of_class(model):
        found = inference.infer(kind, model)
    else:
        raise ModelError(neither_folder_nor_type(model))
    if output is not None:
        output.write_text(READING + found.text, "utf-8")
    if json:
        c.print_json({"model": model, **found.facts, "table": found.text})
        return
    if output is None:
        print(READING + found.text)
    summary = f"exact: random elements change the outputs of tiny twins by {found.departure:.1e}; "
    summary += f"{100 * found.free:.0f} % of its matrices can move"
    if found.unknown:
        summary += f"; without a rule: {', '.join(found.unknown)}"
    if found.lowered:
        summary += f"; fixed, since elements changed the outputs: {', '.join(found.lowered)}"
    if found.fits is False:
        summary += "; but it does not describe the model itself, which has other tensors, or sizes unlike its twins'"
    if output is None:
        c.console.print(summary)  # so that the output is a table, for `> FILE`
    else:
        c.stdout().print(f"{output}: {summary}")
