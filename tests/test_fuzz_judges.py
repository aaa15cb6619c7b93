# SPDX-License-Identifier: Apache-2.0
"""The campaign's own judgement: what it takes for equal, and what it can damage."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
import zoo
from safetensors.torch import load_file, save_file

import onebasin

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import damage, equality
from fuzz.folders import seeded


def test_a_padded_query_without_keys_counts_for_nothing(tmp_path: Path) -> None:
    """In a window that looks both ways the last padded query attends to nothing, not even by rows that sum to one."""
    config = {**zoo.ROTARY, "use_bidirectional_attention": True, "sliding_window": 3, "attention_bias": True}
    source = zoo.save(seeded(zoo.build("Gemma3ForCausalLM", **config), 0), tmp_path / "source")
    onebasin.canonical(source, tmp_path / "copy")
    assert equality.refuse_difference(source, tmp_path / "copy", []) < equality.ROUNDINGS
    model = equality.load(source)
    given = zoo.inputs(model)
    last = (
        zoo.named_outputs(equality.load(tmp_path / "copy"), given)["logits"] - zoo.named_outputs(model, given)["logits"]
    )
    assert float(last[1, -1].abs().max()) > 0.01 > 1e-4 > float(last[:, :5].abs().max())


def test_saved_maps_with_indices_can_be_damaged(tmp_path: Path) -> None:
    for seed in range(60):
        save_file({"map": torch.arange(6)}, tmp_path / "model.safetensors")
        damage.values(tmp_path, random.Random(seed))
        assert load_file(tmp_path / "model.safetensors").keys() == {"map"}
