# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: rewriting base and adapter is rewriting the merged model. The folders are built by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elements import random_alignment
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from zoo import CASES, inputs, load, outputs, save

from onebasin.models import Canonical, Folder, Model, ModelError
from onebasin.running.lora import CONFIG, WEIGHTS, Adapter, fit, folded, rewritten_adapter, write_adapter
from onebasin.symmetry import Alignment, acting_groups

RANK, SCALE = 3, 0.7
ADAPTED = ["BertForSequenceClassification", "GPT2LMHeadModel", "GPT2LMHeadModel-cross", "LlamaForCausalLM",
           "LlamaForCausalLM-biases", "Qwen3ForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM-groups",
           "DebertaV2ForMaskedLM", "BloomForCausalLM", "ViTForImageClassification",
           "DeiTModel"]  # fmt: skip


def lora(model: PreTrainedModel, folder: Path, only: str = "", seed: int = 0, **config: Any) -> Path:
    """An adapter, as `peft` writes it, of every matrix and table of a model whose module name contains `only`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {}
    for name, module in model.named_modules():
        if only not in name or name.endswith("lm_head") or "decoder" in name:  # tied
            continue
        key = f"base_model.model.{name}"
        if isinstance(module, nn.Linear):
            tensors[f"{key}.lora_A.weight"] = random(RANK, module.in_features)
            tensors[f"{key}.lora_B.weight"] = random(module.out_features, RANK)
        elif isinstance(module, Conv1D):
            tensors[f"{key}.lora_A.weight"] = random(RANK, module.weight.shape[0])
            tensors[f"{key}.lora_B.weight"] = random(module.weight.shape[1], RANK)
        elif isinstance(module, nn.Embedding):
            tensors[f"{key}.lora_embedding_A"] = random(RANK, module.num_embeddings)
            tensors[f"{key}.lora_embedding_B"] = random(module.embedding_dim, RANK)
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "fan_in_fan_out": transposed, **config}
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(facts))
    save_file(tensors, folder / WEIGHTS)
    return folder


@torch.no_grad()
def merge(model: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """Add the adapter to the model's weights: s B A, transposed where a module stores (in, out)."""
    for name in tensors:
        module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
        if factor not in ("A.weight", "embedding_A"):
            continue
        delta = SCALE * tensors[name.replace("_A", "_B")] @ tensors[name]
        weight = model.get_submodule(module).weight
        stored = isinstance(model.get_submodule(module), Conv1D | nn.Embedding)
        weight.add_(delta.T if stored else delta)
    return model


def alignment_of(checkpoint: Model, level: str) -> Alignment:
    groups = acting_groups(checkpoint.signature, level, rescale="joint")
    return random_alignment(checkpoint.signature, groups, seed=1)


def rewritten(checkpoint: Model, alignment: Alignment, case: str, folder: Path) -> PreTrainedModel:
    folder.mkdir()
    tensors = {}
    for role, entry in checkpoint.signature.tensors.items():
        moved = alignment.apply(checkpoint.signature, role, checkpoint.read(role, torch.float64))
        tensors.update({name: part.contiguous() for name, part in entry.split(moved)})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.raw_config))
    return load(case, folder)


@pytest.mark.parametrize("level", ["paper", "permutation"])
@pytest.mark.parametrize("case", ADAPTED)
def test_rewriting_base_and_adapter_is_rewriting_the_merged_model(case: str, level: str, tmp_path: Path) -> None:
    base = CASES[case]().double()
    adapter = Adapter(lora(base, tmp_path / "lora"))
    folder = Folder(save(base, tmp_path / "base"))
    merged = merge(base, adapter.tensors)
    alignment = alignment_of(folder, level)
    moved = rewritten_adapter(adapter, fit(adapter, folder), alignment, torch.float64)
    assert sum(not torch.equal(moved[name], adapter.tensors[name]) for name in moved) > len(folder.signature.layers)

    one = merge(rewritten(folder, alignment, case, tmp_path / "one"), moved)
    two = rewritten(Folder(save(merged, tmp_path / "merged")), alignment, case, tmp_path / "two")
    for (name, x), y in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, msg=name)
    given = inputs(merged)
    for x, y in zip(outputs(one, given), outputs(merged, given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", ["orthogonal", "full", "invertible"])
@pytest.mark.parametrize("case", ["LlamaForCausalLM", "LlamaForCausalLM-tied", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                                  "GemmaForCausalLM"])  # fmt: skip
def test_norms_fold_into_the_adapter_as_into_the_base(case: str, level: str, tmp_path: Path) -> None:
    """The canonical form of the base, rotated, with the adapter is the merged model."""
    base = CASES[case]().double()
    adapter = Adapter(lora(base, tmp_path / "lora", "proj"))
    folder = Folder(save(base, tmp_path / "base"))
    merged = merge(base, adapter.tensors)
    fitted = fit(adapter, folder)
    inner = folded(adapter, fitted, folder, torch.float64)
    form = Canonical(folder, torch.float64)
    alignment = alignment_of(form, level)
    moved = rewritten_adapter(adapter, fitted, alignment, torch.float64, inner)
    one = merge(rewritten(form, alignment, case, tmp_path / "one"), moved)
    two = load(case, save(merged, tmp_path / "merged"))  # a scale of Gemma's is rounded where it is not read in float64
    for x, y in zip(outputs(one, inputs(two)), outputs(two, inputs(two)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case, only, words",
    [
        ("GPT2LMHeadModel", "c_fc", "biases move through the weights"),
        ("LlamaForCausalLM-biases", "o_proj", "biases move through the weights"),
        ("LlamaForCausalLM-tied", "embed_tokens", "a tied table"),
    ],
)
def test_what_does_not_fold_is_refused(case: str, only: str, words: str, tmp_path: Path) -> None:
    base = CASES[case]()
    adapter, folder = Adapter(lora(base, tmp_path / "lora", only)), Folder(save(base, tmp_path / "base"))
    with pytest.raises(ModelError, match=words):
        folded(adapter, fit(adapter, folder), folder, torch.float64)


def test_trained_biases_and_whole_modules_move_like_those_of_the_base(tmp_path: Path) -> None:
    case = "BertForSequenceClassification"
    base = CASES[case]().double()
    folder = Folder(save(base, tmp_path / "base"))
    alignment = alignment_of(folder, "permutation")
    adapter = Adapter(lora(base, tmp_path / "lora", "layer.0.intermediate"))
    bias = torch.randn(10, dtype=torch.float64)
    adapter.tensors = {
        "base_model.model.bert.encoder.layer.0.intermediate.dense.lora_B.bias": bias,
        "base_model.model.bert.encoder.layer.0.intermediate.dense.bias": bias,
        "base_model.model.classifier.weight": torch.randn(3, 12, dtype=torch.float64),
    }
    moved = rewritten_adapter(adapter, fit(adapter, folder), alignment, torch.float64)
    bias_role = "encoder.layer.0.intermediate.dense.bias"
    for name, role in zip(moved, (bias_role, bias_role, "classifier.weight"), strict=True):
        expected = alignment.apply(folder.signature, role, adapter.tensors[name])
        assert torch.equal(moved[name], expected) and not torch.equal(moved[name], adapter.tensors[name])


def test_names_with_and_without_the_prefix(tmp_path: Path) -> None:
    """An adapter of a model with a head fits the folder of its base model, which has no prefix."""
    base, headed = CASES["BertModel"]().double(), CASES["BertForSequenceClassification"]().double()
    folder = Folder(save(base, tmp_path / "base"))
    adapter = Adapter(lora(headed, tmp_path / "lora", "query"))
    alignment = alignment_of(folder, "paper")
    moved = rewritten_adapter(adapter, fit(adapter, folder), alignment, torch.float64)
    name = "base_model.model.bert.encoder.layer.1.attention.self.query.lora_B.weight"
    padded = torch.cat([adapter.tensors[name], torch.zeros(12, 9, dtype=torch.float64)], 1)
    role = "encoder.layer.1.attention.self.query.weight"
    expected = alignment.apply(folder.signature, role, padded)[:, :RANK]
    torch.testing.assert_close(moved[name], expected)


def test_the_written_folder_is_an_adapter_in_its_stored_dtype(tmp_path: Path) -> None:
    base = CASES["GPT2LMHeadModel"]()
    adapter = Adapter(lora(base, tmp_path / "lora", bias="none"))
    adapter.tensors = {name: tensor.bfloat16() for name, tensor in adapter.tensors.items()}
    folder = Folder(save(base, tmp_path / "base"))
    moved = rewritten_adapter(adapter, fit(adapter, folder), alignment_of(folder, "paper"))
    (tmp_path / "out").mkdir()
    write_adapter(adapter, moved, tmp_path / "out", "new-base")
    again = Adapter(tmp_path / "out")
    assert again.config == {**adapter.config, "base_model_name_or_path": "new-base"}
    assert {tensor.dtype for tensor in again.tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in moved.items())


@pytest.mark.parametrize(
    "config, words",
    [
        ({"peft_type": "IA3"}, "peft_type LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ],
)
def test_adapters_that_cannot_be_rewritten_exactly(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = lora(CASES["GPT2Model"](), tmp_path / "lora", "c_fc", **config)
    with pytest.raises(ModelError, match=words):
        Adapter(folder)


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("h.0.nowhere.lora_A.weight", (3, 12), "belongs to no tensor"),
        (
            "h.0.mlp.c_fc.lora_A.weight",
            (3, 10),
            r"shape \(3, 10\), but 'h.0.mlp.c_fc.weight' of the base model needs \(3, 12\)",
        ),
        ("h.0.ln_1.lora_A.weight", (3, 12), "does not adapt a matrix"),
        ("h.0.mlp.c_fc.lora_A.weight", (3, 12, 1), "does not adapt a matrix"),
    ],
)
def test_tensors_that_do_not_fit(name: str, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    base = CASES["GPT2Model"]()
    folder = Folder(save(base, tmp_path / "base"))
    adapter = Adapter(lora(base, tmp_path / "lora", "c_fc"))
    adapter.tensors = {f"base_model.model.{name}": torch.ones(shape)}
    with pytest.raises(ModelError, match=words):
        fit(adapter, folder)


def test_an_adapter_whose_file_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    lora(CASES["LlamaForCausalLM"](), tmp_path / "lora")
    (tmp_path / "lora" / "LICENSE").symlink_to(__file__)
    with pytest.raises(ModelError, match="leads out of its folder"):
        Adapter(tmp_path / "lora")


def test_experts_and_damage_are_refused(tmp_path: Path) -> None:
    base = CASES["MixtralForCausalLM"]()
    folder = Folder(save(base, tmp_path / "base"))
    expert = next(entry.pieces[0] for entry in folder.signature.tensors.values() if entry.pieces)
    adapter = Adapter(lora(base, tmp_path / "lora", "q_proj"))
    adapter.tensors = {f"base_model.model.{expert.removesuffix('weight')}lora_A.weight": torch.ones(3, 16)}
    with pytest.raises(ModelError, match="single expert"):
        fit(adapter, folder)
    file = tmp_path / "lora" / WEIGHTS
    tensors = load_file(file)
    save_file({name: tensor.fill_(torch.nan) for name, tensor in tensors.items()}, file)
    with pytest.raises(ModelError, match="does not contain finite"):
        Adapter(tmp_path / "lora")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ModelError, match="damaged or cut short"):
        Adapter(tmp_path / "lora")
    file.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        Adapter(tmp_path / "lora")
