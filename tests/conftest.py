# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the path of `models`, one thread, seeds, and float64 that is float64 throughout."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn import functional
from transformers.models.deberta import modeling_deberta


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)  # the models are tiny, and other processes of the run want the cores


# Norms that compute in float32 whatever the model's dtype; Gemma's store their weight less one.
RMS = ["llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3", "phi3.Phi3", "olmo2.Olmo2"]
RMS_PLUS_ONE = ["gemma.Gemma", "gemma2.Gemma2", "gemma3.Gemma3"]


def _norm_classes(names: list[str], suffix: str) -> list[type[torch.nn.Module]]:
    found = []
    for name in names:
        module, _, prefix = name.partition(".")
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        found.append(getattr(modeling, prefix + suffix))
    return found


@pytest.fixture(scope="session", autouse=True)
def _float64_throughout() -> None:
    """Norms and softmaxes that some families compute in float32 keep the dtype of their input."""

    def layer_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)

    def rms(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def rms_plus_one(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    softmax = functional.softmax

    def same_dtype(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **options)

    modeling_deberta.DebertaLayerNorm.forward = layer_norm
    for norm in _norm_classes(RMS, "RMSNorm"):
        norm.forward = rms
    for norm in _norm_classes(RMS_PLUS_ONE, "RMSNorm"):
        norm.forward = rms_plus_one
    functional.softmax = same_dtype
