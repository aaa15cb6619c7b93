# SPDX-License-Identifier: Apache-2.0
"""onebasin study: measurements that take several commands' work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import common as c
from . import tasks as t

app = typer.Typer(help="Measure what matching and merging do to models of yours.", no_args_is_help=True)


@app.command()
@c.exits_with_2
def levels(
    a: Annotated[str, typer.Argument(metavar="A", help="The model at lambda 0, and the anchor: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model at lambda 1, matched to A.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The folder to write levels.json, levels.md and levels.png in.")
    ],
    task: t.Name,
    data: t.Data,
    at: Annotated[
        str, typer.Option("--levels", help=f"Levels of symmetry, of none, {c.LEVELS}.")
    ] = "none,permutation,paper,full,invertible",
    methods: Annotated[str, typer.Option(help=f"Ways to merge, of {c.METHODS}.")] = c.METHODS.replace(" ", ""),
    points: Annotated[int, typer.Option(help="Models on a line, both ends included.")] = 11,
    rescale: c.Rescale = "joint",
    split: t.Split = None,
    limit: t.Limit = None,
    batch: t.Batch = 64,
    context: t.Context = None,
    vocabulary: t.Vocabulary = None,
    mask_id: t.MaskId = None,
    mask_share: t.MaskShare = 0.15,
    maskable: t.Maskable = None,
    seed: t.Seed = 0,
    device: c.Device = "cpu",
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure the barrier between A and B at every level of symmetry, with every way to merge."""
    from onebasin.studies.levels import study_levels, table

    examples = t.load(
        task, data, a, split=split, limit=limit, batch=batch, context=context, vocabulary=vocabulary,
        mask_id=mask_id, mask_share=mask_share, maskable=maskable, seed=seed,
    )  # fmt: skip
    with c.progress(quiet) as tell:
        results = study_levels(
            a, b, examples, output, levels=c.words(at) or [], methods=c.words(methods) or [], points=points,
            rescale=rescale, device=device, overwrite=overwrite, title=f"{task} on {Path(data).name}", tell=tell,
        )  # fmt: skip
    if json:
        c.print_json(results)
    elif not quiet:
        print(table(results), end="")
