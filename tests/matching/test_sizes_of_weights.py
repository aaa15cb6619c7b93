# SPDX-License-Identifier: Apache-2.0
"""Weights near the ends of what float32 holds: matched, or refused in one sentence that says what to do."""

from __future__ import annotations

import re

import pytest
import torch
from pairs import folder
from safetensors.torch import load_file, save_file

import onebasin
from onebasin.models import Folder, ModelError, distances
from onebasin.running import compare

LEVELS = ["paper", "orthogonal", "full", "invertible"]


def scaled(where, kind, seed, scale):
    """A model with every weight times `scale`, rounded to float32."""
    file = folder(where, kind, seed) / "model.safetensors"
    tensors = {name: (tensor.double() * scale).float() for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return where


@pytest.fixture
def pair(tmp_path):
    def make(scale, kind="GPT2LMHeadModel"):
        return [scaled(tmp_path / f"{seed}", kind, seed, scale) for seed in (1, 0)]

    return make


@pytest.mark.parametrize("level", LEVELS)
def test_huge_weights_are_named(pair, tmp_path, level):
    with pytest.raises(ModelError, match=r"the tensor '\S+' of '\S+' has a norm of \S+, too large .*float64"):
        onebasin.match(*pair(1e30), tmp_path / "out", symmetry=level)
    assert not (tmp_path / "out").exists()


def test_huge_weights_of_three_models_are_named(pair, tmp_path):
    models = pair(1e30)
    with pytest.raises(ModelError, match=r"the tensor '\S+' of '\S+' has a norm of"):
        onebasin.merge([*models, models[0]], tmp_path / "out", match="orthogonal")


@pytest.mark.parametrize("scale", [1e-20, 1e25])
def test_the_remedy_of_the_message_works(pair, tmp_path, scale):
    """In float64 every scale is matched like any other."""
    models = pair(scale)
    with pytest.raises(ModelError, match="use --precision float64"):
        onebasin.match(*models, tmp_path / "out")
    found = onebasin.match(*models, tmp_path / "out", precision="float64", verify=False)
    usual = onebasin.match(folder(tmp_path / "a", "GPT2LMHeadModel", 1), folder(tmp_path / "b", "GPT2LMHeadModel"),
                           precision="float64")  # fmt: skip
    for distance in ("distance_before", "distance_after"):
        assert found[distance] / scale == pytest.approx(usual[distance], rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_a_faint_model_beside_one_of_usual_size_is_matched_or_named(tmp_path, kind, level):
    """The scale that makes its heads as large as the anchor's is 1e20, whose square is beyond float32."""
    faint, anchor = scaled(tmp_path / "faint", kind, 1, 1e-20), folder(tmp_path / "anchor", kind, 0)
    try:
        onebasin.match(faint, anchor, tmp_path / "out", symmetry=level, verify="tensors")
    except ModelError as error:
        assert re.search(r"the tensor '\S+' of '\S+faint' has a norm of \S+, too small to be squared", str(error))
        assert not (tmp_path / "out").exists()
        onebasin.match(faint, anchor, tmp_path / "out", symmetry=level, verify="tensors", precision="float64")
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_faint_model_whose_products_lose_digits_is_named(tmp_path, seed):
    """A norm's weight of 1e-20, folded into a matrix of 1e-20, is below what float32 holds in full."""
    kind = "GPT2LMHeadModel"
    faint, anchor = scaled(tmp_path / "faint", kind, seed, 1e-20), folder(tmp_path / "anchor", kind, 0)
    try:
        onebasin.match(faint, anchor, tmp_path / "out", symmetry="orthogonal")
    except ModelError as error:
        assert re.search(r"the tensor '\S+' of '\S+faint' has a norm of \S+, too small to be squared", str(error))
        onebasin.match(faint, anchor, tmp_path / "out", symmetry="orthogonal", precision="float64")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_denormal_weights_are_refused_or_stay_as_they_are(pair, tmp_path, kind, level):
    """Rewritten they would lose what digits they have, which outputs in float32, all zero, do not show."""
    models = pair(1e-42, kind)
    try:
        found = onebasin.match(*models, tmp_path / "out", symmetry=level, anchor_output=tmp_path / "anchor")
    except ModelError as error:
        assert re.search(r"too small|holds few digits|differs from the original", str(error))
        assert not (tmp_path / "out").exists()
    else:
        assert found["distance_after"] == found["distance_before"] > 0


@pytest.mark.parametrize("verify", ["tensors", "outputs"])
def test_a_faint_canonical_form_is_named(pair, tmp_path, verify):
    """A norm's weight of 1e-42 that moves into a matrix of 1e-42 is nothing in float32, and something in float64."""
    with pytest.raises(ModelError, match=r"holds few digits|differs from the original|too small"):
        onebasin.canonical(pair(1e-42)[0], tmp_path / "out", verify=verify)
    assert not (tmp_path / "out").exists()


def test_a_faint_table_is_named(tmp_path):
    """A table of 1e-42 that turns in the stream loses digits, though the model was run in float64 to verify it."""
    model, anchor = (folder(tmp_path / str(seed), "GPT2LMHeadModel", seed) for seed in (0, 1))
    tensors = load_file(model / "model.safetensors")
    tensors["transformer.wte.weight"] *= 1e-42
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="holds few digits"):
        onebasin.match(model, anchor, tmp_path / "out", symmetry="invertible")
    assert not (tmp_path / "out").exists()
    onebasin.match(model, anchor, tmp_path / "out", symmetry="permutation")  # in another order it has all of them


def test_outputs_below_float32_are_compared_in_float64(pair):
    """Two different models whose outputs are zeros in float32."""
    found = compare(*pair(1e-30))
    assert not found.same
    assert found.relative_difference > 0.1


def test_distances_of_the_smallest_numbers_are_not_zero(pair):
    one, other = map(Folder, pair(1e-42))
    found, back = distances(one, other), distances(other, one)
    assert found.distance == back.distance > 0
    tensors = [load_file(each.folder / "model.safetensors") for each in (one, other)]
    expected = sum(float((tensors[0][name].double() - t.double()).square().sum()) for name, t in tensors[1].items())
    assert found.distance == pytest.approx(expected**0.5, rel=1e-9)
    assert torch.finfo(torch.float32).tiny > found.distance
