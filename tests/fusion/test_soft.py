# SPDX-License-Identifier: Apache-2.0
"""Merging with soft couplings: exact in the limit, marked as inexact."""

from __future__ import annotations

import torch
from pairs import folders
from safetensors.torch import load_file

import onebasin


def test_at_a_low_temperature_nothing_changes_and_the_note_says_it_is_soft(tmp_path):
    pair = folders(tmp_path, apart=0.3)
    onebasin.merge(pair, tmp_path / "hard", anchor=0, match="paper")
    found = onebasin.merge(pair, tmp_path / "cold", anchor=0, soft=1e-3)
    onebasin.merge(pair, tmp_path / "warm", anchor=0, soft=1.0)
    assert any("no longer the same" in note for note in found["notes"])
    hard, cold, warm = (load_file(tmp_path / name / "model.safetensors") for name in ("hard", "cold", "warm"))
    for name in hard:
        assert torch.allclose(hard[name], cold[name], atol=1e-4)
    assert any(not torch.allclose(hard[name], warm[name], atol=1e-3) for name in hard if "mlp" in name)
