# SPDX-License-Identifier: Apache-2.0
"""`onebasin match --adapter`: a LoRA adapter of the source is rewritten along with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder, model, scrambled, weights
from safetensors.torch import load_file, save_file
from zoo import CASES, ROTARY, build, save

RANK = 2


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """An adapter, as `peft` writes it, of all matrices in the layers of a BERT classifier."""
    where = tmp_path / "lora"
    where.mkdir()
    tensors = {}
    for name, tensor in model(seed=1).named_parameters():
        if "layer." in name and tensor.dim() == 2:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1])
            tensors[f"{key}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK)
    save_file(tensors, where / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "base_model_name_or_path": "b"}
    (where / "adapter_config.json").write_text(json.dumps(facts))
    return where


def merged(base: Path, lora: Path, where: Path) -> Path:
    shutil.copytree(base, where)
    tensors, factors = weights(base), load_file(lora / "adapter_model.safetensors")
    for name in factors:
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            tensors[target] = tensors[target] + factors[name.replace("_A.", "_B.")] @ factors[name]
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return where


@pytest.mark.parametrize("level", ["paper", "permutation"])
def test_the_adapted_models_are_one_function(level: str, ask: Any, a: Path, lora: Path, tmp_path: Path) -> None:
    """The source is the anchor scrambled, so that matching has to move everything."""
    before = (lora / "adapter_model.safetensors").read_bytes()
    source = scrambled(a, tmp_path / "source", level)
    found = ask("match", source, a, "-o", tmp_path / "out", "--adapter", lora, "--symmetry", level)
    assert found["adapter_output"] == str(tmp_path / "out-adapter")
    moved = tmp_path / "out-adapter"
    config = json.loads((moved / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "out") and config["r"] == RANK
    one, two = merged(source, lora, tmp_path / "one"), merged(tmp_path / "out", moved, tmp_path / "two")
    assert ask("verify", one, two)["same"]
    assert not ask("verify", one, merged(tmp_path / "out", lora, tmp_path / "three"), code=1)["same"]
    assert (lora / "adapter_model.safetensors").read_bytes() == before


def test_norms_fold_into_it_where_the_stream_rotates(ask: Any, refused: Any, tmp_path: Path) -> None:
    """A Llama, whose RMSNorms leave every adapter a place to fold into."""
    anchor = save(CASES["LlamaForCausalLM"](), tmp_path / "anchor")
    source, where = scrambled(anchor, tmp_path / "source"), tmp_path / "lora"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in weights(source).items():
        if "_proj" in name:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1], generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK, generator=generator)
    where.mkdir()
    save_file(tensors, where / "adapter_model.safetensors")
    (where / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    ask("match", source, anchor, "-o", tmp_path / "out", "--adapter", where, "--symmetry", "full")
    one = merged(source, where, tmp_path / "one")
    two = merged(tmp_path / "out", tmp_path / "out-adapter", tmp_path / "two")
    assert ask("verify", one, two)["same"]
    wide = save(build("LlamaForCausalLM", **{**ROTARY, "intermediate_size": 14}), tmp_path / "wide")
    words = ("match", source, wide, "-o", tmp_path / "wider", "--adapter", where, "--symmetry", "full")
    assert "is widened to the anchor's sizes" in refused(*words)


def test_where_it_goes(run: Any, refused: Any, a: Path, b: Path, lora: Path, tmp_path: Path) -> None:
    words = ("match", b, a, "-o", tmp_path / "out", "--adapter", lora, "--adapter-output")
    assert f"{tmp_path / 'there'}: the adapter of" in run(*words, tmp_path / "there").stdout
    shutil.rmtree(tmp_path / "out")
    assert "exists; choose another place or pass --overwrite" in refused(*words, tmp_path / "there")
    assert "is one of the inputs" in refused(*words, lora)
    assert "are the same, or one is inside the other" in refused(*words, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    assert "it has no adapter_config.json" in refused(*words, tmp_path / "mine", "--overwrite")
    assert run(*words, tmp_path / "there", "--overwrite").exit_code == 0


def test_what_cannot_be_done(refused: Any, a: Path, b: Path, lora: Path, tmp_path: Path) -> None:
    words = ("match", b, a, "-o", tmp_path / "out", "--adapter")
    for level in ("orthogonal", "full", "invertible"):
        line = refused(*words, lora, "--symmetry", level)
        assert "biases move through the weights" in line and "use paper or permutation" in line
    assert "has no adapter_config.json" in refused(*words, tmp_path / "no")
    other = folder(tmp_path / "other", "GPT2LMHeadModel")
    assert "belongs to no tensor" in refused("match", other, other, "-o", tmp_path / "out", "--adapter", lora)
    narrow = folder(tmp_path / "narrow", intermediate_size=8)
    line = refused("match", narrow, narrow, "-o", tmp_path / "out", "--adapter", lora)
    assert "intermediate.dense" in line and "of the base model needs" in line
