# SPDX-License-Identifier: Apache-2.0
"""Matching and merging on calibration data, through the public functions."""

from __future__ import annotations

import json

import pytest
import torch
from models import CASES, save

import onebasin


def pair(case, folder):
    model = CASES[case]()
    save(model, folder / "a")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save(model, folder / "b")
    return [folder / "a", folder / "b"]


@pytest.mark.parametrize("match_with", ["weights", "activations"])
def test_progressive_merging_on_what_the_models_write(tmp_path, match_with):
    models = pair("GPT2LMHeadModel", tmp_path)
    found = onebasin.merge(
        models, tmp_path / "out", method="progressive", match="full", match_with=match_with, data="self", samples=64
    )
    assert onebasin.Checkpoint(tmp_path / "out").signature.tensors  # an ordinary folder
    assert found["ridge"] is None or found["ridge"] > 0
    losses = found["held_back_losses"]
    assert losses[str(found["ridge"])] == min(losses.values())  # what was chosen was the best on held-back data
    assert all(difference < 1e-4 for difference in found["max_output_difference"])
    assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["options"]["data"] == "self"


@pytest.mark.parametrize("start", ["weights", "activations"])
def test_learned_matching_is_exact_and_ends_in_an_ordinary_folder(tmp_path, start):
    models = pair("GPT2LMHeadModel", tmp_path)
    found = onebasin.match(
        models[1], models[0], tmp_path / "out", symmetry="full", match_with="learned", start=start, steps=4,
        data="self", samples=64,
    )  # fmt: skip
    assert found["max_output_difference"] < 1e-4
    assert onebasin.verify(models[1], tmp_path / "out").same


def test_one_model_given_twice_is_itself(tmp_path):
    first, _ = pair("GPT2LMHeadModel", tmp_path)
    onebasin.merge([first, first], tmp_path / "out", method="progressive", match="none", data="self", samples=64)
    assert onebasin.verify(first, tmp_path / "out").relative_difference < 1e-4


@pytest.mark.parametrize(
    ("case", "how", "sentence"),
    [
        ("GPT2LMHeadModel", dict(method="progressive"), "calibration data are missing"),
        ("GPT2LMHeadModel", dict(match_with="activations"), "calibration data are missing"),
        ("BertForMaskedLM", dict(method="progressive", data="self"), "writes no text of its own"),
        ("GPT2LMHeadModel", dict(match_with="smells", data="self"), "choose one of weights, activations, learned"),
        ("BertModel", dict(method="progressive", data="rows.jsonl"), "say --task"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(tmp_path, case, how, sentence):
    with pytest.raises(ValueError, match=sentence):
        onebasin.merge(pair(case, tmp_path), tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
