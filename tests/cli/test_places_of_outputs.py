# SPDX-License-Identifier: Apache-2.0
"""No command writes over what it reads, what exists, or its own outputs; all of this is told before any work."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pairs import folders

import onebasin
from onebasin.models.weight_files import Target


def fingerprint(where: Path) -> dict[str, str]:
    return {str(path.relative_to(where)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(where.rglob("*")) if path.is_file()}  # fmt: skip


@pytest.fixture
def gpt(tmp_path: Path) -> list[Path]:
    return folders(tmp_path)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("work was done before the outputs were checked")

    for name in ("match.align", "merge.in_one_frame", "refine.Data", "statistics.Data"):
        monkeypatch.setattr(f"onebasin.jobs.{name}", fail)
    monkeypatch.setattr("onebasin.studies.demo.train", fail)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_file_of_an_input_is_no_output(
    refused: Any, a: Path, gpt: list[Path], tmp_path: Path, overwrite: list[str]
) -> None:
    source, anchor = gpt
    data = tmp_path / "data.txt"
    data.write_text("text")
    before = fingerprint(tmp_path)
    weights = source / "model.safetensors"
    matching = ("match", source, anchor, "-o", tmp_path / "out")
    for words, said in (
        ((*matching, "--alignment", weights), "is a file of the model"),
        ((*matching, "--alignment", anchor / "config.json"), "is a file of the model"),
        ((*matching, "--checkpoint", weights), "is a file of the model"),
        (
            ("merge", *gpt, "-o", tmp_path / "out", "--match-with", "learned", "--data", data, "--checkpoint", data),
            "is one of",
        ),
        (("statistics", source, "-o", weights, "--data", data), "is a file of the model"),
        (("statistics", source, "-o", data, "--data", data), "is one of the inputs"),
        (
            ("refine", source, "--teachers", anchor, "-o", tmp_path / "out", "--checkpoint", weights),
            "is a file of the model",
        ),
        (("canonical", source, "-o", source), "is one of the inputs"),
        (("refine", source, "--teachers", anchor, "-o", anchor), "is one of the inputs"),
    ):
        assert said in refused(*words, *overwrite)
    assert fingerprint(tmp_path) == before


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_outputs_that_meet(refused: Any, gpt: list[Path], tmp_path: Path, overwrite: list[str]) -> None:
    """The anchor and the output, the alignment inside the output, and so on."""
    out = tmp_path / "out"
    matching = ("match", *gpt, "-o", out, "--symmetry", "full", *overwrite)
    anchor = tmp_path / "out-anchor"
    for more in (("--anchor-output", out), ("--anchor-output", out / "anchor"), ("--alignment", out),
                 ("--anchor-output", tmp_path / "no" / ".." / "out"), ("--alignment", out / "maps.safetensors"),
                 ("--alignment", anchor), ("--checkpoint", anchor / "state")):  # fmt: skip
        assert "are the same, or one is inside the other" in refused(*matching, *more)


@pytest.mark.usefixtures("no_work")
def test_what_exists_is_kept_unless_told(refused: Any, gpt: list[Path], tmp_path: Path) -> None:
    """Alignments and anchors like outputs; and with --overwrite, a folder of somebody's is still no anchor's."""
    (tmp_path / "maps").write_text("my maps")
    (tmp_path / "out-anchor").mkdir()
    (tmp_path / "out-anchor" / "letter").write_text("dear")
    matching = ("match", *gpt, "-o", tmp_path / "out")
    assert "the alignment" in (line := refused(*matching, "--alignment", tmp_path / "maps")) and "exists" in line
    assert "out-anchor' exists" in refused(*matching, "--symmetry", "full")
    assert "is not a model folder" in refused(*matching, "--symmetry", "full", "--overwrite")
    assert (tmp_path / "maps").read_text() == "my maps"


@pytest.mark.usefixtures("no_work")
def test_empty_names(refused: Any, a: Path, gpt: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, place = tmp_path / "data.txt", tmp_path / "place"
    data.write_text("text")
    place.mkdir()
    monkeypatch.chdir(place)
    source, anchor = gpt
    study = ("--task", "causal-lm", "--data", data)
    for words in (
        ("match", *gpt, "-o", ""), ("match", *gpt, "-o", "x", "--alignment", ""),
        ("match", *gpt, "-o", "x", "--anchor-output", "", "--symmetry", "full"),
        ("merge", *gpt, "-o", ""), ("canonical", source, "-o", ""), ("refine", source, "--teachers", anchor, "-o", ""),
        ("statistics", source, "-o", "", "--data", data), ("barrier", *gpt, "-o", "", *study),
        ("study", "levels", *gpt, "-o", "", *study), ("demo", "-o", ""),
    ):  # fmt: skip
        assert "is empty" in refused(*words)
    config = tmp_path / "merge.yml"
    config.write_text(
        f"merge_method: linear\nmodels: [{{model: {source}}}, {{model: {anchor}}}]\nparameters: {{weight: 0.5}}\n"
    )
    assert "is empty" in refused("merge", "--config", config, "-o", "")
    with pytest.raises(ValueError, match="is empty"):
        onebasin.merge(gpt, "")
    assert not list(place.iterdir())


@pytest.mark.usefixtures("system")
def test_after_a_refusal_at_the_end_nothing_of_the_set_exists(
    refused: Any, gpt: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor is the last to be written: what was finished before does not appear."""
    real = Target.refuse_infinite

    def failing(self: Target, name: str, tensor: Any) -> None:
        if self.out.name == "out-anchor":
            raise ValueError("the anchor cannot be written")
        real(self, name, tensor)

    monkeypatch.setattr(Target, "refuse_infinite", failing)
    line = refused(
        "match", *gpt, "-o", tmp_path / "out", "--symmetry", "full", "--alignment", tmp_path / "new" / "maps"
    )
    assert "the anchor cannot be written" in line


@pytest.mark.usefixtures("system")
def test_a_set_is_replaced_as_a_whole(ask: Any, gpt: list[Path], tmp_path: Path) -> None:
    words = ["match", *gpt, "-o", tmp_path / "out", "--symmetry", "full", "--alignment", tmp_path / "maps"]
    ask(*words)
    before = fingerprint(tmp_path)
    shutil.rmtree(tmp_path / "out-anchor")
    (tmp_path / "maps").write_text("broken")
    ask(*words, "--overwrite")
    after = fingerprint(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name.endswith("safetensors"))
    assert onebasin.Alignment.load(tmp_path / "maps").elements


@pytest.mark.usefixtures("no_work")
def test_a_demo_replaces_nothing_but_a_demo(refused: Any, a: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(a, tmp_path / "mine" / "model-0")
    before = fingerprint(mine)
    assert "it has no results.json" in refused("demo", "-o", tmp_path / "mine")
    assert fingerprint(mine) == before


def test_a_study_asks_for_its_pictures_too(refused: Any, gpt: list[Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "levels.png").write_text("mine")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a"}) + "\n")
    words = ("study", "levels", *gpt, "-o", tmp_path / "there", "--task", "causal-lm", "--data", data)
    assert "levels.png' exists" in refused(*words)
