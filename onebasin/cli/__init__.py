# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin file per command, which parses words and prints results.

What a command does lives in `onebasin.jobs` and below; nothing here computes.
"""

from __future__ import annotations

import atexit
import gc
import os
from typing import Annotated

import typer

# Read when transformers is imported, which no command does before it has something to do.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Read when torch first makes a tensor: those of 2 MB and more on large pages (Linux). A temporary matrix of 64 MB then
# costs a fifth of the time, most of which went into touching small pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from . import (
    audit,
    barrier,
    canonical,
    check,
    demo,
    distance,
    env,
    evaluate,
    families,
    inspect,
    match,
    merge,
    refine,
    statistics,
    study,
    verify,
)
from .common import exits_with_2

app = typer.Typer(
    help="Put transformers that were trained apart into one loss basin, and merge them there. "
    "A MODEL is a Hugging Face model folder or a hub id (owner/name).",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from onebasin import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # Importing torch and transformers makes a million objects that stay: looking through them for garbage, again and
    # again, takes about a tenth of the time that starting takes.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # nor once more at the end, when all memory is given back anyway


for command in (
    inspect.inspect,
    check.check,
    match.match,
    merge.merge,
    refine.refine,
    statistics.statistics,
    verify.verify,
    audit.audit,
    distance.distance,
    canonical.canonical,
    evaluate.evaluate,
    barrier.barrier,
    families.families,
    env.env,
    demo.demo,
):
    app.command()(exits_with_2(command))
app.add_typer(study.app, name="study")
