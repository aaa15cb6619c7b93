# SPDX-License-Identifier: Apache-2.0
"""The whole model folders that cases copy and damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from zoo import CASES, GPT2, ROTARY, TEXT, build, save

BASES = {
    "bert": ("BertForSequenceClassification", TEXT),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", {**ROTARY, "num_hidden_layers": 1}),
}
WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(2, 23))]


def seeded(model: PreTrainedModel, seed: int, scale: float = 0.1) -> PreTrainedModel:
    """Move every parameter away from where it is; no two seeds give the same."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def make(shared: Path) -> None:
    """Write two models of each base, with a tokenizer, and an adapter of the first BERT."""
    for base, (kind, config) in BASES.items():
        for seed, name in enumerate("ab"):
            folder = save(seeded(build(kind, **config), seed), shared / f"{base}-{name}")
            tokens = {word: number for number, word in enumerate(WORDS)}
            model = {"type": "WordLevel", "vocab": tokens, "unk_token": "[UNK]"}
            (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
            (folder / "vocab.txt").write_text("\n".join(WORDS))
    adapter = shared / "adapter"
    adapter.mkdir()
    name = "base_model.model.bert.encoder.layer.{}.attention.self.{}.lora_{}.weight"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.format(layer, part, which): torch.randn((2, 12) if which == "A" else (12, 2), generator=generator)
        for layer in range(2) for part in ("query", "value") for which in "AB"
    }  # fmt: skip
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query", "value"]}
    (adapter / "adapter_config.json").write_text(json.dumps(facts))
    assert CASES  # every family's classes were imported with them


def copied(shared: Path, name: str, where: Path) -> Path:
    """Copy one of the folders."""
    where.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(shared / name, where))
