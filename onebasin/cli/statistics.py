# SPDX-License-Identifier: Apache-2.0
"""onebasin statistics"""

from __future__ import annotations

from typing import Annotated

import typer

from . import common as c
from . import tasks as t


def statistics(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to measure: a folder or a hub id.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The file to write.")],
    kind: Annotated[str, typer.Option(help=f"What to measure: {c.STATISTICS}.")] = "fisher",
    data: c.Data = None,
    columns: t.Columns = None,
    samples: c.Samples = 256,
    labels: c.Labels = "sampled",
    draws: c.Draws = 1,
    canonical: Annotated[
        bool,
        typer.Option("--canonical", help="Of the canonical form, for levels that move the residual stream."),
    ] = False,
    task: c.Task = None,
    context: c.Context = None,
    vocabulary: c.Vocabulary = None,
    mask_id: t.MaskId = None,
    maskable: t.Maskable = None,
    precision: c.Precision = "float32",
    device: c.Device = "cpu",
    seed: c.Seed = 0,
    family: c.Family = None,
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure on data what fisher and regmean need to know of a model, and keep it in a file."""
    from onebasin.jobs.statistics import statistics as measure

    with c.progress(quiet) as tell:
        result = measure(
            model, output, kind, data=c.datasets(data), columns=t.renamed(columns), samples=samples, labels=labels,
            draws=draws, canonical=canonical, task=task, context=context, vocabulary=vocabulary, mask_id=mask_id,
            maskable=t.ids(maskable), precision=precision, device=device, seed=seed, family=family,
            overwrite=overwrite, tell=tell,
        )  # fmt: skip
    c.print_notes(result, quiet)
    if json:
        c.print_json(result)
    elif not quiet:
        print(f"{result['output']}: {kind} of {result['tensors']} tensors, over {result['samples']} examples")
