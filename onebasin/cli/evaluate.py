# SPDX-License-Identifier: Apache-2.0
"""onebasin evaluate"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import common as c
from . import tasks as t


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models to measure: folders or hub ids.")],
    task: t.Name,
    data: t.Data,
    columns: t.Columns = None,
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
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure models on a task: loss, accuracy, and the metrics that the task is judged by."""
    from onebasin.data import evaluate as measure
    from onebasin.data import load_model
    from onebasin.jobs.options import refuse_device

    refuse_device(device)
    results = []
    with c.progress(quiet) as tell:
        for model in models:
            examples = t.load(
                task, data, model, split=split, limit=limit, batch=batch, context=context, vocabulary=vocabulary,
                mask_id=mask_id, mask_share=mask_share, maskable=maskable, seed=seed, columns=t.renamed(columns),
                by_length=True,
            )  # fmt: skip
            moved = load_model(model, task).to(device)  # type: ignore[arg-type]
            scores = measure(moved, examples, tell)
            # A regression has no accuracy.
            found = {"loss": scores.loss, "accuracy": scores.accuracy, **scores.metrics}
            results.append({"model": model, **{name: value for name, value in found.items() if value == value}})
    if json:
        c.print_json({"task": task, "data": data, "results": results})
        return
    names = list(results[0])
    table = Table(*names)
    for result in results:
        table.add_row(*(shown if isinstance(shown := result.get(name, ""), str) else f"{shown:.4f}" for name in names))
    Console().print(table)
