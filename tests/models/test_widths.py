# SPDX-License-Identifier: Apache-2.0
"""A narrow model inside a wider one computes the same function, and matches and merges there."""

from __future__ import annotations

import pytest
import torch
from zoo import GPT2, IMAGE, TEXT, build, save

import onebasin
from onebasin.models import Canonical, Folder, Widened, write_model
from onebasin.running import compare

WIDER = {
    "GPT2LMHeadModel": (GPT2, dict(n_embd=20, n_head=5), dict(n_embd=24, n_head=3), dict(n_inner=17)),
    "ViTForImageClassification": (
        IMAGE,
        dict(hidden_size=20, num_attention_heads=5),
        dict(hidden_size=24, num_attention_heads=3, intermediate_size=30),
        dict(intermediate_size=33),
    ),
    "BertForMaskedLM": (TEXT, dict(intermediate_size=16), dict(intermediate_size=31)),
}
PAIRS = [(kind, i) for kind, (_, *changes) in WIDER.items() for i in range(len(changes))]


def two(kind, number, folder):
    base, *changes = WIDER[kind]
    for name, config in (("narrow", base), ("wide", {**base, **changes[number]})):
        save(build(kind, **config).double(), folder / name)
    return folder / "narrow", folder / "wide"


@pytest.mark.parametrize(("kind", "number"), PAIRS)
def test_the_widened_model_computes_the_same_function(kind, number, tmp_path):
    narrow, wide = two(kind, number, tmp_path)
    form = Widened(Canonical(Folder(narrow), torch.float64), Canonical(Folder(wide), torch.float64))
    tensors = ((entry.name, form.read(role, torch.float64)) for role, entry in form.signature.tensors.items())
    write_model(tmp_path / "out", tensors, form, dtype=torch.float64)
    assert Folder(tmp_path / "out").config["hidden_size"] == Folder(wide).config["hidden_size"]
    assert compare(narrow, tmp_path / "out", dtype=torch.float64).relative_difference < 1e-9


@pytest.mark.parametrize(("kind", "number"), PAIRS)
def test_all_that_a_widened_model_says_is_wide(kind, number, tmp_path):
    """Its config, its signature and what it reads are those of one model, which could be a folder."""
    narrow, wide = (Canonical(Folder(folder)) for folder in two(kind, number, tmp_path))
    form = Widened(narrow, wide)
    for role, entry in form.signature.tensors.items():
        assert tuple(form.read(role).shape) == entry.shape
    changes = WIDER[kind][1 + number]
    assert {key: form.config[key] for key in changes} == {key: form.raw_config[key] for key in changes} == changes
    again = Widened(narrow, wide).origin
    assert again is narrow.origin and again.raw_config == Folder(again.folder).raw_config


@pytest.mark.usefixtures("three_sweeps")
@pytest.mark.parametrize(("kind", "number"), PAIRS)
def test_match_and_merge_at_the_wider_width(kind, number, tmp_path):
    narrow, wide = two(kind, number, tmp_path)
    result = onebasin.match(narrow, wide, tmp_path / "out", symmetry="full", precision="float64")
    assert result["distance_after"] < result["distance_before"]
    assert result["max_output_difference"] < 1e-6
    merged = onebasin.merge([narrow, wide], tmp_path / "merged", match="full", verdict=False)
    assert merged["anchor"] == 1
    assert Folder(tmp_path / "merged").shapes == Folder(tmp_path / "out-anchor").shapes


def test_a_wider_source_and_a_post_norm_stream_are_refused(tmp_path):
    narrow, wide = two("GPT2LMHeadModel", 0, tmp_path)
    with pytest.raises(ValueError, match="the anchor must be the wider model"):
        onebasin.match(wide, narrow, tmp_path / "out", symmetry="full")
    for name, width in (("a", 12), ("b", 24)):
        save(build("BertForMaskedLM", **{**TEXT, "hidden_size": width}), tmp_path / name)
    with pytest.raises(ValueError, match="LayerNorm writes back"):
        onebasin.match(tmp_path / "a", tmp_path / "b", tmp_path / "out", symmetry="full")
    assert not (tmp_path / "out").exists()
