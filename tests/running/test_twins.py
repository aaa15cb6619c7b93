# SPDX-License-Identifier: Apache-2.0
"""Tiny twins of model types: they run, in float64, and keep what is no size."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from onebasin.running import twins

TYPES = ["llama", "qwen3_next", "gpt_oss", "gemma3_text", "deepseek_v3", "mpnet", "marian", "convnext", "resnet"]


@pytest.mark.parametrize("kind", TYPES)
def test_a_twin_runs_in_float64(kind: str) -> None:
    model, inputs = twins.build(kind)
    found = twins.outputs(model, inputs)
    assert found and all(bool(value.isfinite().all()) for value in found)
    assert sum(parameter.numel() for parameter in model.parameters()) < 10**6


def test_ratios_stay() -> None:
    given = CONFIG_MAPPING["qwen3_next"]()
    small = twins.twin_config(given)
    assert small.num_attention_heads // small.num_key_value_heads > 1
    assert small.linear_num_value_heads == 2 * small.linear_num_key_heads
    assert small.num_experts > small.num_experts_per_tok > 1
    assert sorted(set(small.layer_types)) == sorted(set(given.layer_types))
