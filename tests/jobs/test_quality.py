# SPDX-License-Identifier: Apache-2.0
"""Merging by how much time it may take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import folders
from zoo import CASES, save

import onebasin
from onebasin.data.calibration import self_generated
from onebasin.data.teaching import HELD_OUT, divergence, forward_of
from onebasin.jobs.quality import CHOOSING, passes_of, simplest_of_best
from onebasin.running.loaded import loaded_model


def divergence_of(merged: Path, models: list[Path], batches: list[dict[str, torch.Tensor]]) -> float:
    """Of a written folder from its sources, measured apart from the code under test."""
    own, *theirs = (loaded_model(onebasin.Folder(folder)) for folder in (merged, *models))
    losses = []
    for batch in batches:
        answers = [forward_of(model)(model.parameter, batch) for model in theirs]
        shares = [1 / len(models)] * len(models)
        losses.append(float(divergence(forward_of(own)(own.parameter, batch), answers, shares, batch)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("quality", ["balanced", "best"])
def test_what_is_chosen_is_written(quality: str, tmp_path: Path) -> None:
    models = folders(tmp_path)
    found = onebasin.merge(models, tmp_path / "out", quality=quality, samples=128, steps=6, anchor=0)
    report = found["quality"]
    starts = {"weights", "activations"} | ({"learned"} if quality == "best" else set())
    assert {name.split(",")[0].split(" ")[0] for name in report["candidates"]} == starts
    assert report["chosen"].endswith(", " + found["method"])
    writers = [loaded_model(onebasin.Folder(folder)).model for folder in models]
    batches = self_generated(writers, 128, None, 0)
    share = HELD_OUT if found["method"] == "progressive" else CHOOSING  # fitted once more, on more data
    held = batches[-max(1, round(share * len(batches))) :]
    # Canonical forms write other sequences than their sources only where rounding tips a draw.
    wanted = pytest.approx(found["held_out_losses"][found["method"]], rel=0.05)
    assert divergence_of(tmp_path / "out", models, held) == wanted
    said = " ".join(found["notes"])
    assert report["chosen"] in said and ("refine" in said if quality == "best" else "the next quality, best" in said)
    assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["result"]["quality"]["level"] == quality


def test_the_simplest_within_one_standard_error_is_chosen() -> None:
    hard = torch.randn(400, generator=torch.Generator().manual_seed(0)).square()  # some examples are harder for all
    noise = 0.1 * torch.randn(400, generator=torch.Generator().manual_seed(1))
    tied = noise - noise.mean() + 0.1 / 400**0.5 / 2  # half a standard error worse
    assert simplest_of_best({"first": hard + tied, "second": hard}) == "first"
    assert simplest_of_best({"first": hard, "second": hard + tied}) == "first"
    assert simplest_of_best({"first": hard + tied + 0.02, "second": hard}) == "second"  # four errors worse
    assert simplest_of_best({"first": hard[:1] + 0.1, "second": hard[:1]}) == "second"  # one example knows no error


def test_fast_needs_no_data_and_says_what_more_would_cost(tmp_path: Path) -> None:
    models = folders(tmp_path, "BertForMaskedLM")
    found = onebasin.merge(models, tmp_path / "fast", quality="fast", anchor=0)
    plain = onebasin.merge(models, tmp_path / "plain", match="full", anchor=0)
    first, second = (loaded_model(onebasin.Folder(tmp_path / name)).parameter for name in ("fast", "plain"))
    assert all(torch.equal(first[role], second[role]) for role in first)
    assert found["quality"]["next"]["level"] == "balanced" and found["quality"]["next"]["seconds"] > 0
    assert found["method"] == plain["method"] == "average"


def test_a_vision_model_needs_images(tmp_path: Path) -> None:
    models = folders(tmp_path, "ViTForImageClassification")
    with pytest.raises(ValueError, match="calibration data are missing"):
        onebasin.merge(models, tmp_path / "out", quality="balanced")
    assert not (tmp_path / "out").exists()


def test_heads_of_different_tasks_cannot_be_compared(tmp_path: Path) -> None:
    models = folders(tmp_path, "BertForSequenceClassification")
    other = save(CASES["BertForMaskedLM"](), tmp_path / "other")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": {list(range(5, 7 + n % 9))}}}\n' for n in range(64)))
    with pytest.raises(ValueError, match="their heads have no output in common"):
        onebasin.merge([models[0], other], tmp_path / "out", quality="balanced", data=str(rows), mask_id=4)


def test_relatives_may_stay_unmatched(tmp_path: Path) -> None:
    near, far = (folders(tmp_path / str(apart), apart=apart, n_layer=1) for apart in (0.01, 1.0))
    for models, wanted in ((near, True), (far, False)):
        found = onebasin.merge(models, quality="balanced", samples=64)
        assert any(name.startswith("unmatched") for name in found["quality"]["candidates"]) == wanted


def test_three_models_are_learned_together(tmp_path: Path) -> None:
    models = folders(tmp_path, count=3, n_layer=1)
    found = onebasin.merge(models, tmp_path / "out", quality="best", samples=64, steps=2)
    assert any(name.startswith("learned from") for name in found["quality"]["candidates"])
    assert len(found["distance_after"]) == 2


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (dict(quality="good"), "choose one of fast, balanced, best"),
        (dict(quality="fast", match="full"), "quality chooses match by itself"),
        (dict(quality="best", method="progressive"), "quality chooses method by itself"),
        (dict(quality="best", match_with="activations"), "quality chooses match-with by itself"),
        (dict(quality="best", spread=True), "quality chooses spread by itself"),
    ],
)
def test_what_quality_settles_is_not_told_twice(how: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        onebasin.merge(folders(tmp_path), **how)


def test_passes_are_counted() -> None:
    """Two models: activations 2, progressive merging 3 for each of two starts and for the chosen one."""
    assert passes_of("balanced", 2, 0) == 2 + 3 * 3
    assert passes_of("best", 3, 10) == 4 + 4 * 4 + 3 + 30
