# SPDX-License-Identifier: Apache-2.0
"""Results of a study as files, and the report: all studies of a folder on one HTML page that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from onebasin.engine import appearing_json, appearing_text
from onebasin.jobs.report import html_page, html_table
from onebasin.landscape.plots import require_matplotlib

from .charts import draw, save, svg
from .results import Results, Table, read_all, shown

_STYLE = """
nav a { margin-right: 1rem; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
"""

# A click on a heading sorts its table by that column, numbers by value; a second click reverses the order.
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
  const column = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
  const value = cell => cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value;
  const key = row => value(row.cells[column]);
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = (a, b) => a === b ? 0 : typeof a !== typeof b ? (typeof a === "number" ? -1 : 1) : a < b ? -1 : 1;
  [...body.rows].sort((a, b) => (down ? -1 : 1) * order(key(a), key(b))).forEach(row => body.append(row));
});
"""


def write(results: Results, folder: Path) -> None:
    """Write NAME.json, a PNG per chart, and the report on all studies in the folder. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in results.charts:
        save(draw(chart), folder / f"{results.study}-{chart.name}.png")
    appearing_json(folder / f"{results.study}.json", asdict(results))
    appearing_text(folder / "report.html", report(read_all(folder)))


def report(studies: Sequence[Results]) -> str:
    """Return an HTML page: a part per study with its text, tables (sortable), charts, settings and command.

    It contains its style, script and pictures, and follows the reader's light or dark mode.
    """
    links = "".join(f'<a href="#{_anchor(s)}">{_text(s.title)}</a>' for s in studies)
    parts = "".join(map(_shown, studies))
    body = f"<h1>Studies</h1>\n<nav>{links}</nav>\n{parts}<script>{_SCRIPT}</script>\n"
    return html_page("onebasin: studies", body, _STYLE)


def _text(value: object) -> str:
    """Escape text, for use in text and in attributes."""
    return escape(str(value))


def _anchor(study: Results) -> str:
    return re.sub(r"[^\w-]+", "-", str(study.study))


def _shown(study: Results) -> str:
    """Return the part of a study, or a note if its file does not have the contents of a study."""
    if study.charts:
        require_matplotlib()
    try:
        return _part(study)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        return (f'<section id="{_anchor(study)}">\n<h2>{_text(study.title)}</h2>\n<p>This study cannot be shown '
                f"({_text(why)}).</p>\n</section>\n")  # fmt: skip


def _part(study: Results) -> str:
    charts = "".join(
        f'<figure role="img" aria-label="{_text(chart.title)}">{svg(draw(chart))}</figure>\n' for chart in study.charts
    )
    tables = "".join(map(_table, study.tables))
    notes = "".join(f"<li>{_text(note)}</li>" for note in study.notes)
    asked = _text(json.dumps(study.config, indent=2))
    return (
        f'<section id="{_anchor(study)}">\n<h2>{_text(study.title)}</h2>\n<p>{_text(study.text)}</p>\n{tables}{charts}'
        + (f"<ul>{notes}</ul>\n" if notes else "")
        + (f"<pre>{_text(study.command)}</pre>\n" if study.command else "")
        + f"<details><summary>Settings ({study.seconds:.0f} s)</summary><pre>{asked}</pre></details>\n</section>\n"
    )


def _table(table: Table) -> str:
    heads = (f'<button type="button">{_text(name)}</button>' for name in table.columns)
    return html_table(str(table.caption), heads, (map(_cell, row) for row in table.rows))


def _cell(cell: Any) -> str:
    value = cell[0] if isinstance(cell, list | tuple) else cell
    number = f' data-value="{value}"' if isinstance(value, int | float) else ""
    return f"<td{number}>{_text(shown(cell))}</td>"
