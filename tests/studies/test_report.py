# SPDX-License-Identifier: Apache-2.0
"""The report holds what others wrote into its folder: their words are words, and no markup."""

from __future__ import annotations

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from onebasin.studies.report import report, write
from onebasin.studies.results import Chart, Results, Table

HOSTILE = ['"><script>alert(1)</script>', "' onload='alert(1)", "</pre></style><img src=x onerror=alert(1)>", "&lt;b>",
           "$\\frac{$", "a b"]  # fmt: skip


def study(name: Any) -> Results:
    """A study with the name in every place that a name can come to."""
    plane = {"x": [0, 1], "y": [0, 1], "z": [[1, 2], [2, 4]], "marks": {name: (0, 0)}}
    charts = [
        Chart(name, name, "bars", [name, "a"], {name: [1.0, 2.0], "other": [1.0, 2.0]}, name, name),
        Chart(name, name, "lines", [0, 1], {name: [1, 2], "other": [2, 1]}, name, name),
        Chart(name, name, "contours", [], {name: plane}, name, name),
    ]
    table = Table(name, [name, "x"], [[name, 1.0], [None, (0.5, 0.1)]])
    return Results(name, name, name, {name: name}, [table], charts, 1.0, name, [name])


class Structure(HTMLParser):
    """The tags of a page outside of its charts, with the names of their attributes, and the words between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.words, self.inside = "", 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside += tag == "svg"
        if not self.inside:
            self.tags.append((tag, *(name for name, _ in attributes)))
        assert tag != "img" and not any(name.startswith("on") for name, _ in attributes)

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "svg"

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("name", HOSTILE)
def test_foreign_words_are_no_markup(name: str) -> None:
    pytest.importorskip("matplotlib")
    found, usual = Structure(report([study(name)])), Structure(report([study("usual")]))
    assert found.tags == usual.tags
    in_settings = json.dumps({name: name}).count(name)  # where it is part of JSON
    assert found.words.count(name) == usual.words.count("usual") - 2 + in_settings


def test_a_study_that_somebody_left_in_the_folder(tmp_path: Path) -> None:
    mine = Results("mine", "Mine", "", {}, [], [])
    (tmp_path / "left.json").write_text(json.dumps({**asdict(mine), "study": HOSTILE[0], "title": "\ud800"}))
    write(mine, tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<script>alert" not in page and page.count("<section") == 2


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, '{"study": "x", "tables": [{}], "charts": []}', '{"study": "x", "tables": 1, "charts": []}',
     '{"study": "x", "tables": [], "charts": [], "more": 1}'],
)  # fmt: skip
def test_files_that_are_no_studies_are_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "left.json").write_text(text)
    write(Results("mine", "Mine", "", {}, [], []), tmp_path)
    assert (tmp_path / "report.html").read_text("utf-8").count("<section") == 1


@pytest.mark.parametrize(
    "wrong",
    [{"tables": [{"caption": 1, "columns": 2, "rows": 3}]}, {"seconds": "long"},
     {"charts": [{"name": "x", "title": "x", "kind": "pie", "x": [], "series": {}}]}],
)  # fmt: skip
def test_a_study_that_cannot_be_shown_says_so(tmp_path: Path, wrong: dict[str, Any]) -> None:
    mine = Results("mine", "Mine", "", {}, [], [])
    (tmp_path / "left.json").write_text(json.dumps({**asdict(mine), "title": "Left", **wrong}))
    write(mine, tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<section") == 2 and page.count("This study cannot be shown") == 1
