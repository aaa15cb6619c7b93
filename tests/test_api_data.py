# SPDX-License-Identifier: Apache-2.0
"""Matching and merging on calibration data, through the public functions."""

from __future__ import annotations

import json

import pytest
import torch
from pairs import folders
from transformers import ViTConfig, ViTForImageClassification
from zoo import CASES, save

import onebasin
from onebasin.data.calibration import Calibration, calibration, noised
from onebasin.data.teaching import split_held_out
from onebasin.engine import Means
from onebasin.jobs.options import Options

pytestmark = pytest.mark.usefixtures("three_sweeps")


@pytest.mark.parametrize("match_with", ["weights", "activations"])
def test_progressive_merging_on_what_the_models_write(tmp_path, match_with):
    models = folders(tmp_path)
    found = onebasin.merge(
        models, tmp_path / "out", method="progressive", match="full", match_with=match_with, data="self", samples=64
    )
    assert onebasin.Folder(tmp_path / "out").signature.tensors  # an ordinary folder
    assert found["ridges"] and all(ridge is None or ridge > 0 for (ridge,) in found["ridges"].values())
    losses = found["held_out_losses"]
    assert set(losses) == {"average", "progressive"}
    assert all(difference < 1e-4 for difference in found["max_output_difference"])
    assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["options"]["data"] == "self"


@pytest.mark.parametrize("start", ["weights", "activations", "none"])
def test_learned_matching_is_exact_and_ends_in_an_ordinary_folder(tmp_path, start):
    models = folders(tmp_path)
    found = onebasin.match(
        models[1], models[0], tmp_path / "out", symmetry="full", match_with="learned", start=start, steps=4,
        data="self", samples=64,
    )  # fmt: skip
    assert found["max_output_difference"] < 1e-4
    assert onebasin.verify(models[1], tmp_path / "out").same


def test_data_are_named_by_a_string_or_a_path(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    named = Calibration(data=str(rows))
    assert Calibration(data=rows) == named and Calibration(data=[rows, "self"]).datasets == [str(rows), "self"]
    assert json.dumps(Calibration(data=rows, vocabulary=rows).to_dict())
    assert Options(family=rows) == Options(family=str(rows))


def test_one_model_given_twice_is_itself(tmp_path):
    first, _ = folders(tmp_path)
    onebasin.merge([first, first], tmp_path / "out", method="progressive", match="none", data="self", samples=64)
    assert onebasin.verify(first, tmp_path / "out").relative_difference < 1e-4


@pytest.mark.parametrize(
    ("case", "how", "sentence"),
    [
        ("GPT2LMHeadModel", dict(method="progressive"), "calibration data are missing"),
        ("GPT2LMHeadModel", dict(match_with="activations"), "calibration data are missing"),
        ("GPT2LMHeadModel", dict(match_with="smells", data="self"), "choose from weights, activations, learned"),
        ("BertModel", dict(method="progressive", data="rows.jsonl"), "say --task"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(tmp_path, monkeypatch, case, how, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')  # a file that is missing is refused before all else
    with pytest.raises(ValueError, match=sentence):
        onebasin.merge(folders(tmp_path, case), tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_a_relaxed_merge_says_that_its_models_are_others(tmp_path):
    models = folders(tmp_path)
    how = dict(match="full", match_with="learned", permutations="sinkhorn", steps=3, data="self", samples=64)
    found = onebasin.merge(models, tmp_path / "out", **how)
    assert any("no longer the same functions" in note for note in found["notes"])
    assert all(difference < 1e-4 for difference in found["max_output_difference"])  # before they are relaxed
    with pytest.raises(ValueError, match="use it in a merge"):
        onebasin.match(*models, tmp_path / "other", permutations="sinkhorn")
    with pytest.raises(ValueError, match="leave out --soft and --method progressive"):
        onebasin.merge(models, tmp_path / "other", method="progressive", **how)


def test_three_models_learn_together_and_go_on_from_a_checkpoint(tmp_path):
    models = folders(tmp_path, count=3, n_layer=1)
    how = dict(match="full", match_with="learned", steps=6, data="self", samples=64, anchor=0)
    whole = onebasin.merge(models, tmp_path / "whole", checkpoint=str(tmp_path / "run"), **how)
    with pytest.raises(ValueError, match="patience 0"):
        onebasin.merge(models, tmp_path / "other", patience=0, **how)
    stamp = (tmp_path / "run").stat().st_mtime_ns
    again = onebasin.merge(models, tmp_path / "again", checkpoint=str(tmp_path / "run"), **how)
    assert (tmp_path / "run").stat().st_mtime_ns == stamp  # nothing was left to learn
    assert whole["distance_after"] == again["distance_after"] and len(whole["distance_after"]) == 2
    with pytest.raises(ValueError, match="belongs to another run"):
        onebasin.merge(models, tmp_path / "other", checkpoint=str(tmp_path / "run"), **{**how, "steps": 7})


def test_the_task_s_own_loss_needs_labels(tmp_path):
    models = folders(tmp_path, "BertForMaskedLM")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": {[5 + (i * j) % 15 for j in range(1, 9)]}}}\n' for i in range(1, 41)))
    how = dict(match="full", match_with="learned", loss="task", steps=3, data=str(rows), mask_id=4)
    found = onebasin.merge(models, tmp_path / "out", **how)
    assert all(difference < 1e-4 for difference in found["max_output_difference"])
    with pytest.raises(ValueError, match="choose from divergence, logits, task"):
        onebasin.merge(models, tmp_path / "other", **{**how, "loss": "both"})


def test_calibration_data_of_masked_language_models_tell_what_was_hidden(tmp_path):
    models = [onebasin.Folder(model) for model in folders(tmp_path, "BertForMaskedLM")]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": {[5 + (i * j) % 15 for j in range(1, 9)]}}}\n' for i in range(1, 41)))
    for batch in calibration(models, Calibration(data=str(rows), mask_id=4), Means()):
        assert bool(((batch["labels"] != -100) == (batch["input_ids"] == 4)).all())
    masked = Calibration(data=str(rows), mask_id=4, task="masked-lm")
    base = [onebasin.Folder(model) for model in folders(tmp_path / "base", "BertModel")]
    assert all("labels" not in b for b in calibration(base, masked, Means()))


def test_what_is_held_back_has_its_share_of_every_file(tmp_path):
    models = [onebasin.Folder(model) for model in folders(tmp_path)]
    for number in (0, 1):
        rows = [{"input_ids": [3 + number, 5, 7 + i % 9]} for i in range(48)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Calibration(data=[str(tmp_path / f"{number}.jsonl") for number in (0, 1)], samples=96, task="causal-lm")
    fit, held = split_held_out(calibration(models, given, Means()), None)
    for batches in (fit, held):
        assert {int(first) for batch in batches for first in batch["input_ids"][:, 0]} == {3, 4}
    assert sum(len(batch["input_ids"]) for batch in (*fit, *held)) == 96


def test_models_with_different_numbers_of_positions_learn_on_those_that_both_have(tmp_path):
    short = CASES["GPT2LMHeadModel"]()
    config = type(short.config)(**{**short.config.to_dict(), "n_positions": short.config.n_positions + 4})
    save(short, tmp_path / "short")
    save(type(short)(config), tmp_path / "long")
    for source, anchor in (("short", "long"), ("long", "short")):
        found = onebasin.match(
            tmp_path / source, tmp_path / anchor, tmp_path / f"{source}-out", symmetry="full", match_with="learned",
            steps=3, data="self", samples=64,
        )  # fmt: skip
        assert found["max_output_difference"] < 1e-4


def test_no_noisy_copy_of_an_example_is_on_both_sides():
    images = torch.arange(20.0).view(20, 1, 1, 1, 1).expand(20, 2, 1, 8, 8)
    fit, held = noised([{"pixel_values": image} for image in images], Calibration(noise=0.01))
    seen = [{round(float(batch["pixel_values"].mean())) for batch in side} for side in (fit, held)]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(20))


def test_noise_reaches_merging_of_images(tmp_path):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8,
                       patch_size=4, num_channels=1, num_labels=10)  # fmt: skip
    models = [save(ViTForImageClassification(config), tmp_path / str(number)) for number in range(2)]
    losses = [
        onebasin.merge(models, method="progressive", match="none", data="builtin:digits", samples=64, noise=noise)[
            "held_out_losses"
        ]
        for noise in (0.0, 0.3)
    ]
    assert losses[0] != losses[1]
