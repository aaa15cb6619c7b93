# SPDX-License-Identifier: Apache-2.0
"""The report in headless Chromium: no console messages, charts on the page, no sideways scrolling, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import assert_scheme, look, needs_browser

from onebasin.studies.report import report
from onebasin.studies.results import Chart, Results, Table

pytestmark = needs_browser

# Shows the page as wide as a screen, sorts the first table by its second column, and notes what there is to see.
FRAME = """<!doctype html><body><iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>
document.querySelector("iframe").addEventListener("load", event => {{
  const page = event.target.contentDocument, button = page.querySelectorAll("th button")[1];
  const first = () => [...page.querySelector("tbody").rows].map(row => row.cells[0].textContent);
  const seen = {{before: first()}};
  button.click(); seen.up = first(); button.click(); seen.down = first();
  const style = event.target.contentWindow.getComputedStyle(page.body);
  Object.assign(seen, {{
    scroll: page.documentElement.scrollWidth, width: event.target.contentWindow.innerWidth,
    charts: [...page.querySelectorAll("figure svg")].map(svg => Math.round(svg.getBoundingClientRect().width)),
    words: page.querySelectorAll("figure svg text").length,
    ink: style.color, paper: style.backgroundColor,
  }});
  document.body.dataset.seen = JSON.stringify(seen);
}});
</script></body>"""


def page() -> str:
    matchings = [f"matching number {i}" for i in range(8)]
    rows = [["b", *[(0.5, 0.1)] * 8], ["a", *[2.0] * 8], ["c", *[1] * 8]]
    table = Table("A wide table", ["method", *matchings], rows)
    plane = {"x": [0, 1], "y": [0, 1], "z": [[1, 2], [2, 4]], "marks": {"A": (0, 0)}}
    charts = [
        Chart("bars", "Bars", "bars", ["b", "a"], {name: [(0.5, 0.1), 2.0] for name in matchings}, ylabel="accuracy"),
        Chart("lines", "Lines", "lines", [0, 1], {"one": [1, 2], "two": [2, 1]}, "x", "y"),
        Chart("planes", "Planes", "contours", [], {"plane": plane}, "distance", "loss"),
    ]
    return report([Results("study", "A <study>", "Words & more.", {"task": "x"}, [table], charts, command="onebasin")])


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)], ids=["phone, dark", "desk, light"])
def test_a_reader_sees_charts_and_sorted_tables(tmp_path: Path, width: int, dark: bool) -> None:
    seen = look(tmp_path, FRAME, page(), width, dark)
    assert seen["scroll"] <= seen["width"]  # wide tables scroll by themselves
    assert len(seen["charts"]) == 3 and all(100 < chart <= seen["width"] for chart in seen["charts"])
    assert seen["words"] > 20
    assert (seen["before"], seen["up"], seen["down"]) == (list("bac"), list("bca"), list("acb"))
    assert_scheme(seen, dark)
