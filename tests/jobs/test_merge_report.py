# SPDX-License-Identifier: Apache-2.0
"""The report on a merge: it says what the result says, in words that cannot become markup, and loads nothing."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import assert_scheme, look, needs_browser
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from zoo import CASES, save

import onebasin
from onebasin.cli import app
from onebasin.models import ModelError

pytestmark = pytest.mark.usefixtures("three_sweeps")

HOSTILE = "<script>alert(1)<&>'\"<img src=x onerror=alert(1)>"
VOID = {"meta", "link"}


class Page(HTMLParser):
    """The tags of a page, each of which is closed in its turn, and its words."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.text = file.read_text("utf-8")
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that were drawn apart, so that heads and neurons move."""
    found = []
    for number in range(2):
        model = CASES["GPT2LMHeadModel"]()
        generator = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            if "ln_" not in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        found.append(save(model, tmp_path_factory.mktemp("models") / f"m{number}"))
    return found


@pytest.fixture(scope="module")
def chosen(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A merge that chose among candidates, and its page."""
    output = tmp_path_factory.mktemp("out") / "merged"
    result = onebasin.merge(models, output, anchor=0, report=True, samples=8, context=8)
    assert result["report"] == f"{output}-report.html"
    return result, Path(result["report"])


def test_the_page_holds_the_numbers_of_the_result(chosen: tuple[dict[str, Any], Path], models: list[Path]) -> None:
    result, file = chosen
    page, record = Page(file), json.loads((Path(result["output"]) / "onebasin.json").read_text())
    told = [f"{result['kinship']['cosine']:.3f}", result["kinship"]["kind"], result["method"], result["match"]]
    for which, distances in ((which, pair[which]) for pair in record["distances"] for which in ("before", "after")):
        told += [f"{value:.4g}" for value in (distances["distance"], *distances["layers"].values())]
        assert len(distances["layers"]) == 2, which
    for name, one in result["search"]["candidates"].items():
        told += [name, f"{one['loss']:.4g}"]
    line = result["search"]["line"]
    assert line["lambdas"] == [i / 10 for i in range(11)]
    curves = [line[name] for name in ("unmatched", "matched") if name in line]
    assert page.text.count("<polyline") == len(curves) >= 1
    for curve in curves:  # a model is no way from its own predictions
        assert max(abs(curve[0]), abs(curve[-1])) < 1e-4 and len(curve) == 11
    told.append(f"{max(map(max, curves)):.4g}")
    verdict = result["verdict"]
    told += [f"{100 * share:.1f} %" for share in (*verdict["agreement"], verdict["sources_agree"])]
    told += [f"{apart:.4g}" for apart in verdict["divergence"]]
    parameters = sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(models[0]).parameters())
    told += [f"{parameters:,}", "gpt2", "2 by 12", "A: m0", "B: m1"]
    assert [one for one in told if one not in page.words] == []


def test_heads_and_neurons_are_counted_where_the_alignment_moves_them(models: list[Path], tmp_path: Path) -> None:
    saved = tmp_path / "alignment.safetensors"
    onebasin.match(models[1], models[0], tmp_path / "matched", alignment=saved)
    found = onebasin.Alignment.load(saved).elements
    sizes = {"head": 3, "ffn": 10}
    assert any(f"h.{layer}.ffn" in found for layer in range(2))
    result = onebasin.merge(models, tmp_path / "out", anchor=0, match="paper", verdict=False, report=True)
    page = Page(Path(result["report"]))
    cells = re.findall(r"<td>(.*?)</td>", page.text)
    for layer in range(2):
        still = {space: range(size) for space, size in sizes.items()}
        maps = {space: found.get(f"h.{layer}.{space}") for space in sizes}
        heads, neurons = (list(still[space] if one is None else one.index.tolist()) for space, one in maps.items())
        line = [f"{sum(i != j for i, j in enumerate(index))} of {len(index)}" for index in (neurons, heads)]
        line = [str(layer), *line, " ".join(map(str, heads))]
        assert any(cells[i : i + 4] == line for i in range(len(cells))), (line, cells)
    assert "kinship" in result  # the page tells it, whoever said how to merge


@pytest.mark.parametrize("how", [{"match": "none"}, {"match": "full"}, {"match": "permutation"}], ids=str)
def test_every_way_has_a_page(models: list[Path], tmp_path: Path, how: dict[str, str]) -> None:
    given = [*models, models[0]] if how["match"] == "permutation" else models
    result = onebasin.merge(given, tmp_path / "out", anchor=0, verdict=False, report=True, **how)
    page = Page(Path(result["report"]))
    assert page.words.count(" and A: m0") == len(given) - 1
    assert ("stay where they are" in page.words) == (how["match"] == "none")
    assert ("is rotated" in page.words) == (how["match"] == "full")


def test_names_are_words(models: list[Path], tmp_path: Path) -> None:
    hostile = [shutil.copytree(model, tmp_path / str(i) / HOSTILE) for i, model in enumerate(models)]
    plain = [shutil.copytree(model, tmp_path / str(i) / "usual") for i, model in enumerate(models)]
    pages = []
    for given, name in ((hostile, HOSTILE), (plain, "usual")):
        result = onebasin.merge(given, tmp_path / name, anchor=0, match="paper", report=True, samples=8, context=8)
        pages.append(Page(Path(result["report"])))
    assert [tag for tag, _ in pages[0].tags] == [tag for tag, _ in pages[1].tags]
    assert pages[0].words.count(HOSTILE) == pages[1].words.count("usual") > 3
    assert not any(attribute.startswith("on") for _, attributes in pages[0].tags for attribute in attributes)


def test_nothing_is_loaded_and_no_path_told(chosen: tuple[dict[str, Any], Path], models: list[Path]) -> None:
    page = Page(chosen[1])
    assert {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"} == set()
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]  # the icon that browsers would ask for
    assert "url(" not in page.text and "@import" not in page.text and "http" not in page.text
    assert str(models[0].parent) not in page.text


def test_a_report_is_never_written_over_or_half_there(models: list[Path], tmp_path: Path) -> None:
    """Its place is checked before any work, and it appears with the model or not at all."""
    page = tmp_path / "out-report.html"
    page.write_text("mine")
    told: list[str] = []
    with pytest.raises(ModelError, match=r"the report .* exists"):
        onebasin.merge(models, tmp_path / "out", match="paper", report=True, tell=told.append)
    assert told == [] and page.read_text() == "mine" and not (tmp_path / "out").exists()
    onebasin.merge(models, tmp_path / "out", match="paper", verdict=False, report=True, overwrite=True)
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match="name an output"):
        onebasin.merge(models, report=True)


def test_no_report_is_left_by_a_merge_that_fails(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onebasin.engine.placing._put", fail)
    with pytest.raises(ModelError, match="the disk is full"):
        onebasin.merge(models, tmp_path / "out", match="paper", verdict=False, report=True)
    assert [path for path in tmp_path.iterdir() if "report" in path.name or not path.name.startswith(".")] == []


def test_the_command_names_the_page(models: list[Path], tmp_path: Path) -> None:
    words = ["merge", *map(str, models), "-o", str(tmp_path / "out"), "--match", "paper", "--no-verdict", "--report"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'out'}-report.html" in done.stdout
    assert (tmp_path / "out-report.html").is_file()


FRAME = """<!doctype html><body><iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>
document.querySelector("iframe").addEventListener("load", event => {{
  const page = event.target.contentDocument, view = event.target.contentWindow;
  const style = view.getComputedStyle(page.body);
  document.body.dataset.seen = JSON.stringify({{
    scroll: page.documentElement.scrollWidth, width: view.innerWidth, ink: style.color, paper: style.backgroundColor,
    bars: [...page.querySelectorAll("rect")].map(bar => bar.getBoundingClientRect().width),
    tables: [...page.querySelectorAll(".wide")].every(one => one.scrollWidth <= one.clientWidth),
    ends: [...page.querySelectorAll("svg *")].map(part => part.getBoundingClientRect().right),
  }});
}});
</script></body>"""


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)], ids=["phone, dark", "desk, light"])
def test_a_reader_sees_the_page(chosen: tuple[dict[str, Any], Path], tmp_path: Path, width: int, dark: bool) -> None:
    seen = look(tmp_path, FRAME, chosen[1].read_text("utf-8"), width, dark)
    assert seen["scroll"] <= seen["width"] and max(seen["ends"]) <= seen["width"]
    assert seen["tables"]  # none has to be scrolled
    times = 1 if chosen[0]["match"] == "none" else 2  # before, and after where the models were matched
    assert len(seen["bars"]) == 2 * times and min(seen["bars"]) > 0
    assert_scheme(seen, dark)
