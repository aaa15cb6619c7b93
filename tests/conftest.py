# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the path of `models`, one thread, seeds, and float64 that is float64 throughout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.models.deberta import modeling_deberta


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)  # the models are tiny, and other processes of the run want the cores


@pytest.fixture(scope="session", autouse=True)
def _float64_throughout() -> None:
    """DeBERTa's own LayerNorm computes in float32 whatever the model's dtype; here it keeps that dtype."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)

    modeling_deberta.DebertaLayerNorm.forward = forward
