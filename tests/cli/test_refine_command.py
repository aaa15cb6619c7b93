# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder
from transformers import AutoModelForCausalLM

from onebasin import match, refine
from onebasin.data import load_task, teaching
from onebasin.data.batches import IGNORED
from onebasin.data.made import self_generated
from onebasin.data.teaching import divergence, predictions
from onebasin.models import Folder
from onebasin.running.loaded import loaded_model

SMALL = ("--samples", 24, "--context", 6, "--batch", 4, "--steps", 12, "--lr", 0.01)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny language models, their average, and a worse start."""
    where = tmp_path_factory.mktemp("language-models")
    shares = {"a": 0.0, "b": 0.1, "mean": 0.05, "far": 0.5}
    return {name: folder(where / name, "GPT2LMHeadModel", 1, apart=share) for name, share in shares.items()}


def test_the_folder_loads_and_has_the_reported_loss(ask: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = ask("refine", folders["mean"], "--teachers", folders["a"], "--teachers", folders["b"], "-o", out, *SMALL,
                 "--control", folders["far"])  # fmt: skip
    teachers = [loaded_model(Folder(folders[name])).model for name in "ab"]
    held = self_generated(teachers, 24, 6, 0, 4)[-1:]  # one batch of six
    loaded = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        own, *theirs = (predictions(model(**held[0])) for model in (loaded, *teachers))
        assert float(divergence(own, theirs, [0.5, 0.5], held[0])) == pytest.approx(result["loss_after"], rel=1e-4)
    assert result["loss_after"] < result["loss_before"] < result["control"]["loss_before"]
    assert "distillation" in result["notes"][0] and not any("control" in note for note in result["notes"])
    facts = json.loads((out / "onebasin.json").read_text())
    assert facts["result"]["loss_after"] == result["loss_after"] and len(facts["inputs"]) == 4
    card = (out / "README.md").read_text()
    assert "not alignment" in card and f"{result['control']['loss_after']:.6g}" in card


@pytest.mark.parametrize("faster", [True, False])
def test_progress_says_where_bfloat16_only_costs_time(
    faster: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teaching, "bfloat16_is_faster", lambda device: faster)
    a, b, mean = (folders[name] for name in ("a", "b", "mean"))
    how: dict[str, Any] = {"steps": 2, "data": "self", "samples": 24, "context": 6, "mixed": True}
    said = [list[str](), list[str]()]
    refine(mean, [a, b], tmp_path / "refined", tell=said[0].append, **how)
    match(b, a, tmp_path / "matched", symmetry="invertible", match_with="learned", tell=said[1].append, **how)
    for lines, what in zip(said, ("distilling", "learning"), strict=True):
        steps = [line for line in lines if line.startswith(what) and "step" in line]
        assert steps and all(("slower than float32" in line) != faster for line in steps)


def test_a_saved_run_is_continued(ask: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """The control's run is saved beside; a run that is taken up again makes no step twice."""
    words = ("refine", folders["mean"], "--teachers", folders["a"], "--teachers", folders["b"], *SMALL, "--control",
             folders["far"])  # fmt: skip
    whole = ask(*words, "-o", tmp_path / "whole")
    for out in ("one", "two"):
        result = ask(*words, "-o", tmp_path / out, "--checkpoint", tmp_path / "run")
        assert result["loss_after"] == whole["loss_after"]
        assert result["control"]["loss_after"] == whole["control"]["loss_after"]
        weights = [(tmp_path / made / "model.safetensors").read_bytes() for made in (out, "whole")]
        assert weights[0] == weights[1]
    assert torch.load(tmp_path / "run", weights_only=True)["step"] == 12
    assert torch.load(tmp_path / "run.control", weights_only=True)["step"] == 12


def test_bad_input(refused: Any, folders: dict[str, Path], a: Path, tmp_path: Path) -> None:
    words = ("refine", folders["mean"], "--teachers", folders["a"], "-o", tmp_path / "out")
    assert "positive weights" in refused(*words, *SMALL, "--weights", "1,2")
    assert "separated by commas" in refused(*words, *SMALL, "--weights", "x")
    assert "at least two batches" in refused(*words, "--samples", 4, "--context", 6)
    assert "is one of the inputs" in refused(*words[:-1], folders["a"], "--overwrite")
    assert "there is no folder" in refused("refine", tmp_path / "no", *words[2:])
    assert "for the checkpoint" in refused(*words, *SMALL, "--checkpoint", tmp_path / "none" / "run")


def test_masked_language_models_learn_where_atoms_are_hidden(ask: Any, tmp_path: Path) -> None:
    """`--mask-id`, `--mask-share` and `--maskable` say what is hidden, in training and in what is held out."""
    a, b = (folder(tmp_path / str(seed), "BertForMaskedLM", seed) for seed in (0, 1))
    rows = [{"input_ids": [5 + (7 * i + j) % 10 for j in range(8)]} for i in range(32)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = ask("refine", a, "--teachers", a, "--teachers", b, "-o", tmp_path / "out", "--data", data, "--samples", 32,
                 "--mask-id", 4, "--mask-share", 0.5, "--maskable", "5-9", "--batch", 2, "--steps", 3)  # fmt: skip
    held = load_task("masked-lm", data, a, mask_id=4, mask_share=0.5, maskable=range(5, 10), batch=2).batches[-1]
    hidden = held["labels"] != IGNORED
    assert bool((held["labels"][hidden] < 10).all()) and int(hidden.sum()) == 4
    with torch.no_grad():
        theirs = [predictions(loaded_model(Folder(model)).model(**held)) for model in (a, b)]
    before = float(divergence(theirs[0], theirs, [0.5, 0.5], held))
    assert result["loss_before"] == pytest.approx(before, rel=1e-4) and before > 1e-3
    assert "no control" in result["notes"][1]
