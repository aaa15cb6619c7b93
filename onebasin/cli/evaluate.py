# SPDX-License-Identifier: Apache-2.0
"""onebasin evaluate"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from . import common as c
from . import tasks as t


@t.measures
def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models to measure: folders or hub ids.")],
    examples: t.Examples,
    device: c.Device = "cpu",
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure models on a task: loss, accuracy, and the metrics of the task."""
    import onebasin

    results = []
    examples.refuse_unfit(models, device)
    with c.progress(quiet) as tell:
        for model in models:
            scores = onebasin.evaluate(
                model, examples.data, task=examples.task, device=device, tell=tell, **examples.settings
            )
            # A regression has no accuracy.
            found = {"loss": scores.loss, "accuracy": scores.accuracy, **scores.metrics}
            results.append({"model": model, **{name: value for name, value in found.items() if value == value}})
    if json:
        c.print_json({"task": examples.task, "data": examples.data, "results": results})
        return
    names = list(results[0])
    table = Table(*names)
    for result in results:
        table.add_row(*(shown if isinstance(shown := result.get(name, ""), str) else f"{shown:.4f}" for name in names))
    c.stdout().print(table)
