# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: its code runs, what it quotes is there, what is generated is current."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import pydoc
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from pairs import folder, scrambled
from typer.testing import CliRunner

import onebasin
from onebasin.cli import app
from onebasin.fusion import METHODS
from onebasin.models import Folder
from onebasin.symmetry import LEVELS, groups
from onebasin.symmetry.tables import table
from onebasin.symmetry.tables.signature import MOVES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"make demo", ".venv/bin/onebasin merge demo/model-0 demo/model-1 -o merged", "onebasin demo -o demo",
             "pip install onebasin"}  # fmt: skip


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(language, word after it, text) of every fenced block."""
    for found in FENCE.finditer(page.read_text("utf-8")):
        yield found[1], found[2] or "", found[3]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call A, B, C and demo/model-N."""
    where = tmp_path_factory.mktemp("models")
    for seed, word in enumerate("ABC"):
        folder(where / word, seed=seed)
    digits = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    for seed in (0, 1, 2):
        folder(where / "demo" / f"model-{seed}", "ViTForImageClassification", seed, **digits)
    return where


@pytest.mark.usefixtures("three_sweeps")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_run(page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in one folder, as a reader would run them."""
    for found in models.iterdir():
        (tmp_path / found.name).symlink_to(found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onebasin.jobs.search.Setup.left", 1.0)  # seconds
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for language, argument, text in blocks(page):
        if language == "python":
            exec(compile(text, str(page), "exec"), {"__name__": "__main__"})
        elif language == "sh":
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["make"]:
                    assert words[1] in targets
                elif line not in ELSEWHERE and words:
                    assert words[0] == "onebasin"
                    result = CliRunner().invoke(app, words[1:])
                    assert result.exit_code == 0, f"{line}: {result.output}"
        elif language == "yaml":
            Path(argument).write_text(text, "utf-8")
        elif language == "table":
            Path(f"{text.split()[1]}.txt").write_text(text, "utf-8")
        else:
            assert (language, bool(argument)) == ("lines", True), f"```{language} is not checked by any test"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quoted_lines_are_in_the_tables(page: Path) -> None:
    for language, file, text in blocks(page):
        if language == "lines":
            found = (Path(onebasin.families.__file__).parent / file).read_text("utf-8").splitlines()
            known = {" ".join(line.split("#")[0].split()) for line in found}
            assert {" ".join(line.split()) for line in text.splitlines()} <= known


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_example_table_is_exact(tmp_path: Path) -> None:
    """A random element in every space of the worked example leaves the outputs of stock models as they are."""
    text = next(text for language, _, text in blocks(ROOT / "docs" / "add-a-family.md") if language == "table")
    (tmp_path / "table.txt").write_text(text)
    config = transformers.OpenAIGPTConfig(
        vocab_size=23, n_positions=12, n_embd=12, n_layer=2, n_head=3, num_labels=3, pad_token_id=0
    )
    generator = torch.Generator().manual_seed(0)
    given = {"input_ids": torch.randint(3, 23, (2, 7), generator=generator)}
    for kind in (transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTForSequenceClassification):
        model = kind(config).double().eval()
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        source = tmp_path / kind.__name__
        model.save_pretrained(source)
        assert not list(Folder(source, str(tmp_path / "table.txt")).others())
        for level in ("paper", "permutation", "full"):
            moved = scrambled(source, tmp_path / f"{kind.__name__}-{level}", level, family=str(tmp_path / "table.txt"))
            other = kind.from_pretrained(moved, dtype=torch.float64).eval()
            assert not torch.equal(other.transformer.h[0].mlp.c_fc.weight, model.transformer.h[0].mlp.c_fc.weight)
            with torch.no_grad():
                torch.testing.assert_close(other(**given).logits, model(**given).logits, rtol=1e-9, atol=1e-9)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current() -> None:
    generate = generator()
    assert generate.HELP.read_text("utf-8") == generate.help_texts(), "run python docs/generate.py"
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == generate.commands(), "run python docs/generate.py"
    assert (ROOT / "docs" / "families.md").read_text("utf-8") == generate.family_page(), "run python docs/generate.py"
    chart = (ROOT / "docs" / "images" / "results.svg").read_text("utf-8")
    assert chart == generate.results_chart(), "run python docs/generate.py"


def test_headline_numbers_stand_in_their_studies() -> None:
    """Every number of the table is one of the page that it names."""
    rows = re.findall(
        r"^\| (.*) \| \[[^]]*\]\((results/.*\.md)\) \|$", (ROOT / "docs" / "results.md").read_text(), re.M
    )
    assert len(rows) >= 8
    for row, page in rows:
        said = (ROOT / "docs" / page).read_text("utf-8")
        for cell in row.split(" | ")[1:5]:
            for number in re.findall(r"[0-9.]+", cell):
                assert number == "0" or re.search(rf"(?<![0-9.]){re.escape(number)}(?![0-9])", said), (
                    f"{number} of '{row}' is not in {page}"
                )


def test_methods_names_every_way_to_match_and_merge() -> None:
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    assert not [word for word in (*METHODS, "weights", "activations", "learned") if f"`{word}`" not in text]


def test_the_level_has_one_name_in_all_that_is_shown() -> None:
    """Its other names are accepted, but not taught."""
    shown = [*PAGES, *(ROOT / "examples").glob("*.*")]
    others = re.compile(r"--symmetry \w|\bsymmetry=|{symmetry:")
    assert len(shown) > 30 and not [page for page in shown if others.search(page.read_text("utf-8"))]


def test_every_page_is_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if not re.search(rf"[:-] {re.escape(page)}$", text, re.MULTILINE)]


def test_the_site_lists_arguments_fields_and_errors() -> None:
    """Of every public function and class, in the sections that its parser knows, and under the names in the code."""
    assert "docstring_style: google" in (ROOT / "mkdocs.yml").read_text("utf-8")
    page = [pydoc.locate(name) for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)]
    public = [getattr(onebasin, name) for name in onebasin.__all__]
    assert [found for found in public if callable(found) and found not in page] == []
    for found in page:
        listed = sections(found)
        if inspect.isfunction(found):
            assert listed["Args"] == [*inspect.signature(found).parameters] and "Raises" in listed, found
            continue
        assert inspect.isclass(found)
        if dataclasses.is_dataclass(found):
            fields = {one.name for one in dataclasses.fields(found)}
            told = {one.name for one in dataclasses.fields(found) if "help" in one.metadata}  # by the command line
            own = fields & inspect.get_annotations(found).keys()
            assert own - told <= {*listed["Attributes"]} <= fields | {*dir(found)}, found
        for method in (one for name, one in vars(found).items() if inspect.isfunction(one) and name[0] != "_"):
            arguments = [*inspect.signature(method).parameters][1:]
            assert sections(method).get("Args", arguments[:1]) == arguments, method


def sections(found: object) -> dict[str, list[str]]:
    """Section of a docstring -> the names that it lists. None of them stands in prose."""
    text = inspect.getdoc(found) or ""
    assert not re.search(r"^\w+: \w|Raises \w*Error", text, re.MULTILINE), found
    parts = re.findall(r"^(\w+):\n((?: {4}.*\n|\n)+)", f"{text}\n", re.MULTILINE)
    return {name: re.findall(r"^ {4}(\w+): ", part, re.MULTILINE) for name, part in parts}


def test_concepts_names_every_group_kind_and_level() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text("utf-8")
    classes = [found for _, found in inspect.getmembers(groups, inspect.isclass) if hasattr(found, "nearest")]
    names = {str(found.name) for found in classes if isinstance(getattr(found, "name", None), str)}
    assert len(names) > 5
    assert {group for group in names if group not in text} <= {"fixed"}
    assert not [word for word in (*MOVES, *LEVELS) if f"`{word}`" not in text]


def test_the_notation_names_every_word_that_tables_know() -> None:
    text = FENCE.sub("", (ROOT / "docs" / "notation.md").read_text("utf-8"))
    words = [*table.HEADINGS, *table.SECTIONS, *table.NOTES, *table.AUDITED, *table.PROPERTIES, *table.NORMS, *MOVES]
    said = {word for quoted in re.findall(r"`([^`]+)`", text) for word in (quoted, quoted.split()[0].rstrip(":"))}
    assert len(words) > 50 and set(words) - said == set()
    assert {"when", "otherwise", "lacks", "layer<N", "layer>=N", "per layer", "per stage", "act KEY"} <= said
    assert len(text.splitlines()) < 140  # two screens


def test_the_page_on_inference_counts_what_was_found() -> None:
    families = pytest.importorskip("benchmarks.families")
    found = json.loads((ROOT / "docs" / "families.json").read_text("utf-8"))
    counted, page = families.table(found["types"]), (ROOT / "docs" / "inference.md").read_text("utf-8")
    if found["transformers"] != transformers.__version__:  # where other types are registered
        counted, page = (re.sub(r"^(\|[^|]+\|)[^|]+\|", r"\1", text, flags=re.MULTILINE) for text in (counted, page))
    assert counted in page


def test_the_page_on_inference_says_what_was_recovered() -> None:
    recovery = pytest.importorskip("benchmarks.recovery")
    types = json.loads((ROOT / "docs" / "recovery.json").read_text("utf-8"))["types"]
    assert len(types) >= 30 and all(found["after"] < recovery.RECOVERED for found in types.values())
    assert recovery.summary(types) in " ".join((ROOT / "docs" / "inference.md").read_text("utf-8").split())
