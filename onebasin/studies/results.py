# SPDX-License-Identifier: Apache-2.0
"""Results of a study: tables and charts as data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from onebasin.models.outputs import Output, refuse_outputs
from onebasin.models.published import prose


@dataclass(frozen=True)
class Table:
    """rows: a list of cells for each, one per column. A cell may be (mean, spread)."""

    caption: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Chart:
    """kind: bars, lines or contours; the other fields are for `charts.draw`.

    bars: series name -> [(mean, spread), ...], one per label of `x`. lines: series name -> values over the numbers of
    `x`. contours: name -> {"x", "y", "z" (rows along y), "marks": name -> (x, y)}, one panel each.
    """

    name: str
    title: str
    kind: str
    x: list[Any]
    series: dict[str, Any]
    xlabel: str = ""
    ylabel: str = ""


@dataclass(frozen=True)
class Results:
    """study: the command's name. title, text: for the report. config: the study's file. seconds: of all
    measurements."""

    study: str
    title: str
    text: str
    config: dict[str, Any]
    tables: list[Table]
    charts: list[Chart]
    seconds: float = 0.0
    command: str = ""
    notes: list[str] = field(default_factory=list)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 for a single value)."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def refuse_results(output: str | Path, files: Sequence[str], inputs: Iterable[str | Path], overwrite: bool) -> None:
    """Check the outputs of a study as `refuse_outputs` does: results are only replaced if `overwrite` is given.

    output: the folder. files: those that the study writes to it. inputs: those that it reads; hub ids and names of
    datasets are ignored. Raises ValueError.
    """
    if not str(output).strip():
        raise ValueError("the path of the output is empty")
    there = [Path(given) for given in inputs if os.path.exists(given)]
    refuse_outputs([Output("the output", Path(output) / file, "") for file in files], there, overwrite)


def read_all(folder: Path) -> list[Results]:
    """Return all studies in a folder, in the order of their names; other files are ignored."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(file.read_text("utf-8"))
            if isinstance(facts, dict) and {"study", "tables", "charts"} <= facts.keys():
                # A lone surrogate, which JSON allows and a page does not, becomes "?".
                facts = json.loads(json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace"))
                facts["tables"] = [Table(**table) for table in facts["tables"]]
                facts["charts"] = [Chart(**chart) for chart in facts["charts"]]
                found.append(Results(**facts))
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def markdown(table: Table) -> str:
    """Return the table in Markdown, with three decimals for numbers below 100."""
    lines = ["| " + " | ".join(map(prose, table.columns)) + " |", "|---" + "|---:" * (len(table.columns) - 1) + "|"]
    lines += ["| " + " | ".join(prose(shown(cell)) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def shown(cell: Any) -> str:
    """Return a cell as text: 0.123, 0.123 ± 0.045, or a dash if it was not measured."""
    if cell is None:
        return "-"
    if isinstance(cell, list | tuple):
        return shown(cell[0]) + (f" ± {shown(cell[1])}" if cell[1] else "")
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else str(round(cell, 1))
    return str(cell)
