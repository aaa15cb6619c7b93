# SPDX-License-Identifier: Apache-2.0
"""Tensors that are no parameters of the class: counters, running statistics, and what its forward pass leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from damage import edit_config
from pairs import folders
from safetensors.torch import load_file
from transformers import ResNetForImageClassification

import onebasin
from onebasin.data.teaching import forward_of
from onebasin.fusion.refine import Refining, refine
from onebasin.jobs.refine import rewritten
from onebasin.models import Folder, Held
from onebasin.running import twins
from onebasin.running.loaded import loaded_model
from onebasin.running.probes import probe

COUNTER = "resnet.embedder.embedder.normalization.num_batches_tracked"


@pytest.fixture(scope="module")
def resnets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two ResNets with other weights, running statistics and counters."""
    where, (model, _) = tmp_path_factory.mktemp("resnets"), twins.build("resnet")
    for seed in (0, 1):
        one = twins.random_model(model.config, ResNetForImageClassification, seed)
        one.get_buffer(COUNTER).fill_(100 + seed)
        one.save_pretrained(where / str(seed))
    return [where / "0", where / "1"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.usefixtures("three_sweeps")
def test_counters_are_kept_and_do_not_stop_verification(resnets: list[Path], tmp_path: Path) -> None:
    assert COUNTER in set(Folder(resnets[0]).others())
    onebasin.match(resnets[1], resnets[0], tmp_path / "matched", anchor_output=tmp_path / "anchor", match="full")
    onebasin.merge(resnets, tmp_path / "merged", match="full", anchor=0, verdict=False)
    for folder, counted in (("matched", 101), ("anchor", 100), ("merged", 100)):
        written = tensors(tmp_path / folder)
        assert written.keys() == tensors(resnets[0]).keys() and int(written[COUNTER]) == counted


def test_a_model_is_a_function_of_its_running_statistics_too(resnets: list[Path]) -> None:
    first, second = (loaded_model(Folder(folder), dtype=torch.float64) for folder in resnets)
    other = Folder(resnets[1])
    held = {role: other.read(role, torch.float64) for role in other.signature.tensors}
    batch = probe(first.model, second.model, 2, 8, 0)
    asked = forward_of(first)(held, batch)["logits"]
    assert torch.equal(asked, forward_of(second)(second.parameter, batch)["logits"])
    without = {role: tensor for role, tensor in held.items() if role not in first.buffer}
    assert not torch.allclose(forward_of(first)(without, batch)["logits"], asked)


@pytest.mark.parametrize("kind", ["pooler", "statistics"])
def test_distillation_returns_all_that_a_folder_stores(kind: str, resnets: list[Path], tmp_path: Path) -> None:
    """A masked language model computes without its pooler, and does not learn running statistics."""
    if kind == "pooler":
        a, b = folders(tmp_path, "BertForPreTraining", tie_word_embeddings=False)
        for folder in (a, b):
            edit_config(folder, architectures=["BertForMaskedLM"])
        untouched = ["pooler.dense.weight", "cls.seq_relationship.weight"]
    else:
        (a, b), untouched = resnets, ["embedder.embedder.normalization.running_mean"]
    first, second = Folder(a), Folder(b)
    entries = {role: entry for role, entry in second.signature.tensors.items() if entry.stored}
    held = {role: second.read(role) + 1 for role in entries}
    batches = [probe(*[loaded_model(model).model for model in (first, second)], 2, 8, seed) for seed in range(4)]
    found = refine(Held(first, held), [first, second], batches, Refining(steps=2))
    assert found.tensors.keys() >= entries.keys()
    for role in untouched:
        assert torch.equal(found.tensors[role], held[role]), role
    assert dict(rewritten(first, found)).keys() == first.files.keys() - set(first.others())


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_the_search_merges_a_pooler_that_its_class_leaves_out(tmp_path: Path) -> None:
    models = folders(tmp_path / "models", "BertForPreTraining", apart=1.0, tie_word_embeddings=False)
    for folder in models:
        edit_config(folder, architectures=["BertForMaskedLM"])
    found = onebasin.merge(models, tmp_path / "out", samples=24, anchor=0)
    assert any(name.endswith("distilled") for name in found["search"]["candidates"])
    assert tensors(tmp_path / "out").keys() == tensors(models[0]).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
