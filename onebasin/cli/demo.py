# SPDX-License-Identifier: Apache-2.0
"""onebasin demo"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from . import common as c


def demo(
    output: Annotated[
        str, typer.Option("--output", "-o", help="The folder to write; an earlier demo in it is replaced.")
    ] = "demo",
    seed: Annotated[int, typer.Option(help="Seed of the first model; the others take the next numbers.")] = 0,
    models: Annotated[int, typer.Option(help="How many models to train, at least 2.")] = 3,
    width: Annotated[int, typer.Option(help="Their width, a multiple of 4.")] = 48,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Train small vision transformers on digits, match and merge them."""
    from onebasin.jobs.verdict import Verdict
    from onebasin.studies import demo as study

    with c.progress(quiet) as tell:
        results = study.demo(output, seed=seed, models=models, width=width, tell=tell)
    if json:
        c.print_json(results)
        return
    console = c.stdout()
    console.print(_table(results))
    for group in filter(None, (results["pair"], results["all"])):
        merge = group["best"]
        console.print(f"{merge['folder']}: {Verdict(**merge['verdict']).sentence}")
    picture = results["picture"] or "no picture (pip install 'onebasin[plot]')"
    files = f"{results['pair']['best']['report']}, {picture} and {output}/results.json"
    console.print(f"{results['seconds']:.0f} seconds; wrote {files}")


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="397 test images")
    for name in ("model", "loss", "accuracy", "barrier", "distance"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for i, model in enumerate(results["models"]):
        table.add_row(
            f"{i}, seed {model['seed']}", *_scores(model), "", "", end_section=i == len(results["models"]) - 1
        )
    for level, merge in results["pair"].items():
        distance = f"{merge['distance_after'][0]:.2f}"
        table.add_row(
            f"0 and 1, {_matched(level)}",
            *_scores(merge),
            f"{merge['barrier']:.3f}" if "barrier" in merge else "",
            distance,
        )
    table.add_section()
    for level, merge in results["all"].items():
        table.add_row(
            f"all {len(results['models'])}, {_matched(level)}",
            *_scores(merge),
            "",
            "",
        )
    return table


def _scores(entry: dict[str, Any]) -> tuple[str, str]:
    return f"{entry['loss']:.3f}", f"{100 * entry['accuracy']:.1f} %"


def _matched(level: str) -> str:
    words = {"none": "average as they are", "best": "best merge on images without labels"}
    return words.get(level, f"average matched: {level}")
