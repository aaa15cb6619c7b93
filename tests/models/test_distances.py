# SPDX-License-Identifier: Apache-2.0
"""Distances against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from damage import edit_weights
from safetensors.torch import load_file

from onebasin.engine import Means
from onebasin.models import Folder, distances
from onebasin.symmetry import Alignment, acting_groups

EXACT = Means(precision="float64")


def test_against_a_sum_by_hand(make) -> None:
    a, b = make("BertModel"), make("BertModel", "b")
    edit_weights(b, lambda t: [value.mul_(1.5) for value in t.values()])
    mine, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    squares = {name: float((mine[name].double() - theirs[name].double()).square().sum()) for name in mine}
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in theirs.values()))
    found = distances(Folder(a), Folder(b))
    assert found.distance == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-6)
    assert found.relative == pytest.approx(found.distance / norm, rel=1e-6)
    for layer in ("0", "1"):
        inside = [square for name, square in squares.items() if f"layer.{layer}." in name]
        assert found.layers[layer] == pytest.approx(math.sqrt(sum(inside)), rel=1e-6)
    by_hand = {
        "embedding": [name for name in squares if "embeddings.weight" in name],
        "ffn": [
            name for name in squares if "intermediate" in name or (".output.dense" in name and "attention" not in name)
        ],
        "norm": [name for name in squares if "LayerNorm" in name],
        "attention": [name for name in squares if "attention" in name and "LayerNorm" not in name],
    }
    for part, names in by_hand.items():
        assert found.parts[part] == pytest.approx(math.sqrt(sum(squares[name] for name in names)), rel=1e-6), part


def test_parts_and_layers_add_up(make) -> None:
    found = distances(
        Folder(make("ViTForImageClassification")),
        Folder(make("ViTForImageClassification", "b", num_labels=4)),
    )
    assert math.hypot(*found.parts.values()) == pytest.approx(found.distance)
    assert set(found.parts) == {"attention", "ffn", "norm", "embedding", "head", "other"}
    assert list(found.layers) == ["0", "1"]


def test_zero_and_nothing(make) -> None:
    a, zero = make("BertModel"), make("BertModel", "zero")
    edit_weights(zero, lambda t: [value.zero_() for value in t.values()])
    assert distances(Folder(a), Folder(a)).distance == 0
    assert distances(Folder(zero), Folder(zero)).relative == 0
    assert distances(Folder(a), Folder(zero)).relative == math.inf


def test_an_alignment_moves_the_first_model(make) -> None:
    """|g a - a| by the definition, and 0 for the model that g wrote."""
    folder = make("BertForSequenceClassification", dtype=torch.float64)
    moved = make("BertForSequenceClassification", "moved", dtype=torch.float64)
    a, b = Folder(folder), Folder(moved)
    signature = a.signature
    generator = torch.Generator().manual_seed(0)
    groups = acting_groups(signature, "permutation")
    g = Alignment(
        {
            key: group.random(
                signature.sizes[key],
                tuple(signature.sizes[o] for o in signature.spaces[key].batch),
                generator,
            )
            for key, group in groups.items()
        },
        {key: signature.spaces[key].batch for key in groups},
    )
    tensors = {role: g.apply(signature, role, a.read(role, torch.float64)) for role in signature.tensors}
    edit_weights(
        moved,
        lambda t: t.update({signature.tensors[role].name: value.contiguous() for role, value in tensors.items()}),
    )
    squares = sum(
        float((tensors[role] - b_role).square().sum())
        for role, b_role in ((r, a.read(r, torch.float64)) for r in tensors)
    )
    assert distances(a, a, g, EXACT).distance == pytest.approx(math.sqrt(squares), rel=1e-12)
    assert distances(a, Folder(moved), g, EXACT).distance == 0
    assert distances(a, Folder(moved)).distance > 1
    b.close()
