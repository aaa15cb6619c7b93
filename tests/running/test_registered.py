# SPDX-License-Identifier: Apache-2.0
"""Classes that a program registers with transformers: their tables are inferred, as for those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from zoo import CASES

import onebasin


class MineConfig(LlamaConfig):
    model_type = "mine-llama"


@pytest.fixture
def mine() -> Iterator[type[LlamaForCausalLM]]:
    """A class in another module than its configuration, which nothing but the register leads to."""
    made: type[LlamaForCausalLM] = type("MineLM", (LlamaForCausalLM,), {
        "config_class": MineConfig, "__module__": "elsewhere"})  # fmt: skip
    AutoConfig.register("mine-llama", MineConfig)
    AutoModelForCausalLM.register(MineConfig, made)
    yield made
    CONFIG_MAPPING._extra_content.pop("mine-llama")
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(MineConfig)


def test_a_registered_class_needs_no_table(
    mine: type[LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    usual = CASES["LlamaForCausalLM"]().config.to_dict()
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(mine(MineConfig(**{**usual, "model_type": "mine-llama"})))
    found = onebasin.match(*models)
    assert isinstance(found.model, mine) and found.distance_after < found.distance_before
    assert not found.notes  # no other class stands in for it
    assert not (tmp_path / "cache").exists()  # nothing there would notice that the class has changed
