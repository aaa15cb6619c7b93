# SPDX-License-Identifier: Apache-2.0
"""`onebasin merge --method ot` as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from pairs import folder, scrambled, weights


@pytest.mark.parametrize("match", ["none", "permutation"])
@pytest.mark.parametrize("ground", ["wts", "acts"])
def test_three_scrambled_copies_of_a_model_are_that_model(ask, a, data, tmp_path, ground, match):
    copies = [a, *(scrambled(a, tmp_path / str(seed), "permutation", seed) for seed in (1, 2))]
    words = ["--method", "ot", "--ground", ground, "--data", data, "--task", "text-classification", "--anchor", 0]
    found = ask("merge", *copies, "-o", tmp_path / "merged", "--match", match, *words)
    assert found["method"] == "ot" and found["anchor"] == 0
    merged = weights(tmp_path / "merged")
    assert all(torch.allclose(merged[name], tensor, atol=1e-5) for name, tensor in weights(a).items())


def test_after_a_match_with_rotations_transport_starts_from_the_matched_model(ask, a, tmp_path):
    twin = scrambled(a, tmp_path / "twin", "paper")
    ask("merge", a, twin, "-o", tmp_path / "merged", "--method", "ot", "--anchor", 0)
    merged = weights(tmp_path / "merged")
    assert all(torch.allclose(merged[name], tensor, atol=1e-4) for name, tensor in weights(a).items())


def test_models_of_other_widths_take_the_shapes_of_the_anchor(ask, refused, tmp_path):
    """The widest by default. Soft couplings mix what hard ones assign."""
    narrow = folder(tmp_path / "narrow", "GPT2LMHeadModel")
    wide = folder(tmp_path / "wide", "GPT2LMHeadModel", seed=1, n_embd=18, n_inner=16)
    for entropy in (0, 0.1):
        out = tmp_path / f"merged-{entropy}"
        found = ask("merge", narrow, wide, "-o", out, "--method", "ot", "--match", "none", "--entropy", entropy)
        assert found["anchor"] == 1
        merged, theirs = weights(out), weights(wide)
        assert {name: tensor.shape for name, tensor in merged.items()} == {n: t.shape for n, t in theirs.items()}
        assert all(tensor.isfinite().all() for tensor in merged.values())
    hard, soft = (weights(tmp_path / f"merged-{entropy}") for entropy in (0, 0.1))
    assert any(not torch.allclose(hard[name], soft[name], atol=1e-3) for name in hard)
    line = refused("merge", narrow, wide, "-o", tmp_path / "no", "--match", "none")
    assert "differ in" in line


def test_what_is_refused(refused, a, b, tmp_path):
    merging = ["merge", a, b, "-o", tmp_path / "m", "--match", "none", "--method", "ot"]
    assert "ground 'weights': choose from" in refused(*merging, "--ground", "weights")
    assert "calibration data are missing" in refused(*merging, "--ground", "acts")
    assert "residual 'mean': choose from" in refused(*merging, "--residual", "mean")
    assert "entropy -1.0: it must be" in refused(*merging, "--entropy", -1)
    assert "--soft mixes models" in refused(*merging, "--soft", 0.1)
    kv = [folder(tmp_path / f"kv{n}", "LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=n, head_dim=4)
          for n in (1, 2)]  # fmt: skip
    assert "kv' has" in refused("merge", *kv, "-o", tmp_path / "m", "--match", "none", "--method", "ot")


def test_models_of_other_numbers_of_heads_take_those_of_the_anchor(ask, a, tmp_path):
    heads = folder(tmp_path / "heads", num_attention_heads=2)
    ask("merge", a, heads, "-o", tmp_path / "m", "--match", "none", "--method", "ot", "--anchor", 1)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["num_attention_heads"] == 2
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "m").values())
