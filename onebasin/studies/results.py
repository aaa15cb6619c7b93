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
    """rows: one list of cells per row, as many as there are columns. A cell may be (mean, spread)."""

    caption: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Chart:
    """kind: bars, lines or contours; the rest is what `charts.draw` needs for it.

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
    """study: the command's name. title, text: for the report. config: what was asked. seconds: of all
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
    """Mean and sample standard deviation (0 for a single value)."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def refuse_results(output: str | Path, files: Sequence[str], inputs: Iterable[str | Path], overwrite: bool) -> None:
    """The rule of all studies, see `refuse_outputs`: they replace their own results only where they are told to.

    output: the folder. files: that they write in it. inputs: that they read; ids on the hub and names of datasets are
    passed over. Raises ValueError.
    """
    if not str(output).strip():
        raise ValueError("the path of the output is empty")
    there = [Path(given) for given in inputs if os.path.exists(given)]
    refuse_outputs([Output("the output", Path(output) / file, "") for file in files], there, overwrite)


def read_all(folder: Path) -> list[Results]:
    """Every study that was written into a folder, in the order of their names; other files are passed over."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(file.read_text("utf-8"))
            if isinstance(facts, dict) and {"study", "tables", "charts"} <= facts.keys():
                # Half a character of two (a lone surrogate), which JSON can hold and a page cannot, becomes "?".
                facts = json.loads(json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace"))
                facts["tables"] = [Table(**table) for table in facts["tables"]]
                facts["charts"] = [Chart(**chart) for chart in facts["charts"]]
                found.append(Results(**facts))
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def markdown(table: Table) -> str:
    """The table in Markdown, numbers with three significant decimals."""
    lines = ["| " + " | ".join(map(prose, table.columns)) + " |", "|---" + "|---:" * (len(table.columns) - 1) + "|"]
    lines += ["| " + " | ".join(prose(shown(cell)) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def shown(cell: Any) -> str:
    """A cell as text: 0.123, 0.123 ± 0.045, or a dash for what was not measured."""
    if cell is None:
        return "-"
    if isinstance(cell, list | tuple):
        return shown(cell[0]) + (f" ± {shown(cell[1])}" if cell[1] else "")
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else str(round(cell, 1))
    return str(cell)
