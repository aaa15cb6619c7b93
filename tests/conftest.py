# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the path of `models`, one thread, seeds, and float64 that is float64 throughout."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import settings
from transformers.integrations.moe import ExpertsInterface
from transformers.models.deberta import modeling_deberta

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)  # the models are tiny, and other processes of the run want the cores


# Families that compute norms, softmaxes or scores in float32 whatever the model's dtype.
ROTARY = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "olmo2", "gpt_neox", "gptj",
          "falcon", "stablelm", "starcoder2", "cohere", "opt", "bloom", "mpt",
          "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "modernbert", "deepseek_v2", "deepseek_v3"]  # fmt: skip


def _modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


class _Wide(types.ModuleType):
    """torch, in which float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="session", autouse=True)
def _float64_throughout() -> None:
    """What the models do in float32 by name they do in float64; so do the norms of Gemma and DeBERTa, the rotary
    embeddings of Cohere, ModernBERT and DeepSeek-V2, and Mixtral's router."""

    def layer_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)

    def rms_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def plain_rms_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def apply_rotary(turn: Any) -> Any:
        def apply(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return q * cos + turn(q) * sin, k * cos + turn(k) * sin

        return apply

    def waves(make: Any) -> Any:
        return lambda self, *args, **options: make(self, *args, **options).to(self.dtype)

    def turn_pairs(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
        turned = [torch.view_as_real(pair * turns.unsqueeze(1)).flatten(3) for pair in pairs]
        return turned[0].type_as(q), turned[1].type_as(k)

    def route(self: torch.nn.Module, x: torch.Tensor) -> Any:
        logits = x.flatten(0, -2) @ self.weight.T
        best, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, best / best.sum(-1, keepdim=True), chosen

    _modeling("mixtral").MixtralTopKRouter.forward = route
    for name in ("cohere", "modernbert"):
        _modeling(name).apply_rotary_pos_emb = apply_rotary(_modeling(name).rotate_half)
    _modeling("deepseek_v2").apply_rotary_emb = turn_pairs
    xlnet = _modeling("xlnet").XLNetModel
    xlnet.relative_positional_encoding = waves(xlnet.relative_positional_encoding)
    for name in ROTARY:
        _modeling(name).torch = _Wide("torch")
    ExpertsInterface.get_interface = lambda self, name, default: default  # the grouped product knows no float64
    modeling_deberta.DebertaLayerNorm.forward = layer_norm
    for name in ("T5", "MT5"):
        getattr(_modeling(name.lower()), f"{name}LayerNorm").forward = plain_rms_norm
    for name in ("Gemma", "Gemma2", "Gemma3"):
        getattr(_modeling(name.lower()), f"{name}RMSNorm").forward = rms_norm
