# SPDX-License-Identifier: Apache-2.0
"""The canonical form leaves every model's outputs alone, and lets the stream of pre-norm models rotate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import CASES, inputs, outputs, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from onebasin.checkpoint.reader import Checkpoint
from onebasin.symmetry import Alignment, Signature, acting_groups
from onebasin.symmetry.canonical import Canonical, canonical


def read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {role: checkpoint.read(role, torch.float64) for role in checkpoint.signature.tensors}


def write(form: Canonical, tensors: dict[str, Tensor], given: Path, out: Path) -> Path:
    out.mkdir()
    config = json.loads((given / "config.json").read_text()) | form.config_updates
    (out / "config.json").write_text(json.dumps(config))
    named = {form.signature.tensors[role].name: tensor.contiguous().clone() for role, tensor in tensors.items()}
    save_file(named, str(out / "model.safetensors"), {"format": "pt"})
    return out


def load(model: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """The class of `model` from a folder, every tensor of which must be used."""
    options = {"add_pooling_layer": False} if name.endswith("no-pooler") else {}
    loaded, info = type(model).from_pretrained(folder, dtype=torch.float64, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    loaded.double().load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # DeBERTa's biases: float32
    return loaded.eval()


def difference(one: PreTrainedModel, two: PreTrainedModel) -> float:
    given = inputs(one)
    if one.config.model_type == "gpt2":  # its token types are rows of the token table, which is then summed twice
        given.pop("token_type_ids", None)
    pairs = zip(outputs(one, given), outputs(two, given), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def random_element(signature: Signature, level: str, seed: int = 1) -> Alignment:
    generator = torch.Generator().manual_seed(seed)
    groups = acting_groups(signature, level, rescale="joint")
    elements = {
        key: group.random(signature.sizes[key], tuple(signature.sizes[q] for q in signature.spaces[key].batch), generator)
        for key, group in groups.items()
    }
    return Alignment(elements, {key: signature.spaces[key].batch for key in groups})


@pytest.mark.parametrize("name", CASES)
def test_outputs_stay_and_every_group_acts_afterwards(name: str, tmp_path: Path) -> None:
    model = CASES[name]().double()
    given = save(model, tmp_path / "given")
    checkpoint = Checkpoint(given)
    form = canonical(checkpoint.signature, read(checkpoint))

    folder = write(form, form.tensors, given, tmp_path / "canonical")
    assert difference(model, load(model, folder, name)) < 1e-9

    signature = Checkpoint(folder).signature
    assert set(signature.tensors) == set(form.signature.tensors)
    for level in ("orthogonal", "full"):
        element = random_element(signature, level)
        moved = {role: element.apply(signature, role, tensor) for role, tensor in form.tensors.items()}
        rotated = load(model, write(form, moved, given, tmp_path / level), name)
        assert difference(model, rotated) < 1e-9, level


@pytest.mark.parametrize("name", CASES)
def test_second_run_changes_nothing(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(save(CASES[name]().double(), tmp_path))
    once = canonical(checkpoint.signature, read(checkpoint))
    twice = canonical(once.signature, once.tensors)
    assert not twice.log and not twice.config_updates
    for role, tensor in once.tensors.items():
        assert torch.allclose(tensor, twice.tensors[role], rtol=0, atol=1e-12), role
