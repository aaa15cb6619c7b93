# SPDX-License-Identifier: Apache-2.0
"""Small model folders that the checkpoint tests read, damage and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import PreTrainedModel

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(kind, name="kind", **config) -> the folder of a tiny random model, config values replaced."""

    def build(kind: str = "BertForSequenceClassification", name: str = "", **changes: Any) -> Path:
        dtype = changes.pop("dtype", torch.float32)
        config = {
            **(models.IMAGE if "ViT" in kind else models.GPT2 if "GPT2" in kind else models.TEXT),
            **changes,
        }
        model: PreTrainedModel = models.build(kind, **config).to(dtype)
        return models.save(model, tmp_path / (name or kind))

    return build


@pytest.fixture
def bert(make: Make) -> Path:
    return make()
