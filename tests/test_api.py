# SPDX-License-Identifier: Apache-2.0
"""The library as a user calls it: folders and objects in, folders and objects out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pairs import folder, model, scrambled, weights
from torch import Tensor
from transformers import PreTrainedModel
from zoo import inputs, outputs

import onebasin
from onebasin import Options
from onebasin.symmetry import LEVELS

pytestmark = pytest.mark.usefixtures("nothing_stays_in_the_temporary_folder")

KEYS = {"output", "anchor", "distance_before", "distance_after", "max_output_difference", "seconds"}


def same_function(one: PreTrainedModel, two: PreTrainedModel) -> None:
    given = inputs(one)
    for mine, theirs in zip(outputs(one, given), outputs(two, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def state(one: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.state_dict().items()}


def test_match_of_objects() -> None:
    """Two objects in, one out: the source's function, closer to the anchor; the arguments stay as they are."""
    source, anchor = model(seed=1), model(seed=0)
    before = state(source), state(anchor)
    found = onebasin.match(source, anchor)
    assert found.keys() >= KEYS and found["output"] is None
    matched = found["model"]
    assert type(matched) is type(source) and not matched.training
    same_function(source, matched)
    assert found["distance_after"] < found["distance_before"]
    assert onebasin.distance(matched, anchor).distance == pytest.approx(found["distance_after"], rel=1e-5)
    for now, then in zip((state(source), state(anchor)), before, strict=True):
        assert all(now[name].equal(then[name]) for name in then)


def test_match_of_an_object_to_a_folder(tmp_path: Path) -> None:
    anchor = folder(tmp_path / "anchor", "GPT2LMHeadModel")
    source = model("GPT2LMHeadModel", seed=1)
    found = onebasin.match(source, anchor, tmp_path / "out")
    assert "model" not in found and found["output"] == str(tmp_path / "out")
    assert onebasin.verify(source, tmp_path / "out").same


def test_merge_of_objects_is_a_model_that_runs() -> None:
    models = [model("ViTForImageClassification", seed) for seed in range(3)]
    found = onebasin.merge(models, weights=[0.5, 0.25, 0.25], match="none", verdict=False)
    one, two, three = map(state, models)
    for name, tensor in found["model"].state_dict().items():
        torch.testing.assert_close(tensor, 0.5 * one[name] + 0.25 * two[name] + 0.25 * three[name])
    assert outputs(found["model"], inputs(models[0]))[0].shape == (2, 3)


@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal", "full"])
def test_a_model_and_its_scrambled_copy_merge_into_the_model(tmp_path: Path, level: str) -> None:
    """At every level the merge of copies that differ by the level's own symmetry computes what each computes."""
    original = folder(tmp_path / "original", "ViTForImageClassification")
    canonical = tmp_path / "canonical"
    onebasin.canonical(original, canonical)
    copy = scrambled(canonical, tmp_path / "copy", level, seed=3)
    assert not onebasin.verify(original, onebasin.merge([original, copy], match="none", verdict=False)["model"]).same
    merged = onebasin.merge([canonical, copy], match=level, anchor=0, starts=4, verdict=False)["model"]
    assert onebasin.verify(original, merged).same


def test_three_scrambled_copies_are_matched_together(tmp_path: Path) -> None:
    original = folder(tmp_path / "original")
    copies = [scrambled(original, tmp_path / f"{seed}", "permutation", seed) for seed in (1, 2)]
    found = onebasin.merge([original, *copies], match="permutation", anchor=0, starts=4, verdict=False)
    assert onebasin.verify(original, found["model"]).same
    assert max(found["distance_after"]) < 1e-4 * min(found["distance_before"])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_of_one_model_stay_bit_by_bit(tmp_path: Path, level: str, count: int) -> None:
    """What rounding makes of the identity is no better than the identity."""
    one = folder(tmp_path / "one", "GPT2LMHeadModel")
    canonical = tmp_path / "canonical"
    onebasin.match(one, one, tmp_path / "same", symmetry=level, anchor_output=canonical)
    weighted = [0.5, 0.5, 0.0][:count]
    found = onebasin.merge([one] * count, tmp_path / "out", match=level, weights=weighted, verdict=False)
    assert found["distance_after"] == [0.0] * (count - 1)
    expected = weights(canonical if canonical.exists() else one)
    for written in (weights(tmp_path / "same"), weights(tmp_path / "out")):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


def test_the_objective_only_falls() -> None:
    source, anchor = (model("ViTForImageClassification", seed) for seed in (1, 0))
    for level in ("paper", "permutation", "full"):
        objective = onebasin.match(source, anchor, symmetry=level, precision="float64")["objective"]
        assert len(objective) > 1
        assert all(new <= old * (1 + 1e-9) for old, new in pairwise(objective))


def test_a_second_match_changes_nothing(tmp_path: Path) -> None:
    anchor = folder(tmp_path / "anchor")
    once = onebasin.match(folder(tmp_path / "source", seed=1), anchor, tmp_path / "once", precision="float64")
    twice = onebasin.match(tmp_path / "once", anchor, tmp_path / "twice", precision="float64")
    assert twice["distance_after"] == pytest.approx(once["distance_after"], rel=1e-5)
    before, after = weights(tmp_path / "once"), weights(tmp_path / "twice")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-4)


def test_without_verification_there_is_no_figure() -> None:
    found = onebasin.match(model(seed=1), model(), verify=False)
    assert found["max_output_difference"] is None


def test_progress_is_told() -> None:
    told: list[str] = []
    onebasin.match(model(seed=1), model(), tell=told.append)
    assert any("matching" in line for line in told) and any("verifying" in line for line in told)


BAD = {"precision": "float16", "rescale": "twice", "symmetry": "magic", "layers": [7], "parts": ["mlp"],
       "dtype": "int8", "device": "abacus"}  # fmt: skip


@pytest.mark.parametrize("option", BAD)
def test_bad_options_are_value_errors(option: str) -> None:
    with pytest.raises(ValueError) as caught:
        onebasin.match(model(seed=1), model(), **{option: BAD[option]})
    assert str(BAD[option]).strip("[]'") in str(caught.value) and "\n" not in str(caught.value)


def test_weight_of_a_tensor() -> None:
    """The first name that fits counts; a tensor that none names counts once."""
    options = Options(tensor_weights={"query": 2.0, "attention": 3.0})
    roles = (
        "encoder.layer.0.attention.self.query.weight",
        "encoder.layer.0.attention.self.key.weight",
        "pooler.dense.bias",
    )
    assert [options.weight(role) for role in roles] == [2.0, 3.0, 1.0]


def test_errors_are_value_errors(tmp_path: Path) -> None:
    assert issubclass(onebasin.ModelError, ValueError) and issubclass(onebasin.TableError, ValueError)
    with pytest.raises(onebasin.ModelError, match="there is no folder"):
        onebasin.distance(tmp_path / "no", tmp_path)


def test_a_module_that_is_no_model_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="a Linear is not a PreTrainedModel; give one, a folder or a StateDict"):
        onebasin.distance(torch.nn.Linear(2, 2), model())  # type: ignore[arg-type]


def test_models_in_the_wrong_place_are_refused_in_one_sentence(tmp_path: Path) -> None:
    one = folder(tmp_path)
    with pytest.raises(ValueError, match="a list is not a model; give a folder"):
        onebasin.distance([one], one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be in a list: \[A, B\]"):
        onebasin.merge(one)  # type: ignore[arg-type]


def test_state_dicts_and_files(tmp_path: Path) -> None:
    """A dictionary of tensors with the table that names their axes is a model, and so is a weight file."""
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", seed=1)
    wanted = onebasin.match(a, b)
    config = json.loads((a / "config.json").read_text())
    state = onebasin.StateDict(weights(a), config, table="bert", name="mine")
    found = onebasin.match(state, b / "model.safetensors")
    assert found["distance_after"] == wanted["distance_after"]
    assert found["anchor"] == str(b / "model.safetensors")
    for one, two in zip(found["model"].parameters(), wanted["model"].parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match=r"has no config\.json beside it"):
        onebasin.match((b / "model.safetensors").rename(tmp_path / "lone.safetensors"), a)
