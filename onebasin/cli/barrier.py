# SPDX-License-Identifier: Apache-2.0
"""onebasin barrier"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from . import common as c
from . import tasks as t


@t.measures
def barrier(
    a: Annotated[str, typer.Argument(metavar="A", help="The model at lambda 0, and the anchor: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model at lambda 1.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for barrier.json and barrier.png.")],
    examples: t.Examples,
    points: Annotated[int, typer.Option(help="Models on the line, both ends included.")] = 11,
    match: Annotated[
        str,
        c.level(f"Match B to A first, at this level: none, {c.LEVELS}.", "none"),
    ] = "none",
    rescale: c.Rescale = "joint",
    device: c.Device = "cpu",
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure the loss on the line between A and B. The barrier is the most that it exceeds interpolation between the
    losses of A and B."""
    import onebasin
    from onebasin.engine import appearing_json
    from onebasin.landscape.plots import plot_curves, require_matplotlib
    from onebasin.studies.results import refuse_results

    require_matplotlib()
    folder = Path(output)
    refuse_results(output, ["barrier.json", "barrier.png"], [a, b, examples.data], overwrite)
    with c.progress(quiet) as tell:
        found = onebasin.barrier(
            a, b, examples.data, task=examples.task, points=points, match=match, rescale=rescale, device=device,
            tell=tell, **examples.settings,
        )  # fmt: skip
    c.print_notes({"notes": found.notes}, quiet)
    result = found.to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    appearing_json(folder / "barrier.json", result)
    legend = "as they are" if match == "none" else f"matched: {match}"
    names = (Path(a).name, Path(b).name)
    plot_curves({legend: result}, folder / "barrier.png", title=examples.title, ends=names)
    if json:
        c.print_json(result)
        return
    table = Table("lambda", "loss", "accuracy")
    for lam, loss, accuracy in zip(result["lambdas"], result["losses"], result["accuracies"], strict=True):
        table.add_row(f"{lam:.3g}", f"{loss:.4f}", f"{accuracy:.4f}")
    console = c.stdout()
    console.print(table)
    console.print(f"barrier {result['barrier']:.4f}; written to {output}")
