# SPDX-License-Identifier: Apache-2.0
"""Heads in which some directions hold nothing: widened ones, and those with dimensions at zero."""

from __future__ import annotations

import pytest
import torch
from pairs import folder
from safetensors.torch import load_file, save_file

import onebasin
from onebasin.jobs import aligning
from onebasin.matching import Weights, match_universe, match_weights
from onebasin.models import ModelError
from onebasin.symmetry import LEVELS, Alignment, acting_groups
from onebasin.symmetry.groups import Invertible

SIZES = {"n_head": 4, "n_layer": 2, "n_inner": 16}


def without_two_dimensions(where, width):
    """Two dimensions of the second head of the first layer set to zero, in queries, keys, values and outputs."""
    file = where / "model.safetensors"
    tensors, size = load_file(file), width // SIZES["n_head"]
    empty = torch.arange(2 * size - 2, 2 * size)
    for part in range(3):
        tensors["transformer.h.0.attn.c_attn.weight"][:, part * width + empty] = 0
        tensors["transformer.h.0.attn.c_attn.bias"][part * width + empty] = 0
    tensors["transformer.h.0.attn.c_proj.weight"][empty] = 0
    save_file(tensors, file, {"format": "pt"})
    return where


@pytest.fixture
def narrower(tmp_path):
    """Source and anchor: heads of six dimensions, and of eight."""
    return [folder(tmp_path / str(i), "GPT2LMHeadModel", i, n_embd=width, **SIZES) for i, width in enumerate((24, 32))]


@pytest.fixture
def emptied(tmp_path):
    """Source and anchor of one size: two of six dimensions of one head of the source hold nothing."""
    found = [folder(tmp_path / str(i), "GPT2LMHeadModel", i, n_embd=24, **SIZES) for i in range(2)]
    return [without_two_dimensions(found[0], 24), found[1]]


def condition(file):
    elements = Alignment.load(file).elements
    return max(float(torch.linalg.cond(e.matrix).max()) for e in elements.values() if hasattr(e, "matrix"))


@pytest.mark.parametrize("pair", ["narrower", "emptied"])
def test_invertible_maps_of_deficient_heads_stay_bounded_and_the_distance_is_the_objective(pair, request, tmp_path):
    deficient = request.getfixturevalue(pair)
    result = onebasin.match(
        *deficient, tmp_path / "out", symmetry="invertible", alignment=tmp_path / "maps", max_sweeps=10
    )  # fmt: skip
    assert result["distance_after"] == pytest.approx(result["objective"][-1] ** 0.5, rel=1e-5)
    assert condition(tmp_path / "maps") < 100  # 4 to 7 in float64


WEIGHTED = {"relative": True, "layers": [1]}, {"parts": ["attention"], "tensor_weights": {"attn": 3.0}}


@pytest.mark.parametrize("options", [{}, *WEIGHTED, {"match_with": "activations", "data": "self", "samples": 8}])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_writes_the_distance_that_it_reports(emptied, tmp_path, level, options):
    result = onebasin.match(*emptied, tmp_path / "out", symmetry=level, max_sweeps=3, **options)
    assert result["distance_after"] > 0


@pytest.mark.parametrize("level", ["paper", "invertible"])
def test_a_distance_that_is_not_what_matching_reports_stops_the_job(emptied, tmp_path, level, monkeypatch):
    honest = aligning.align_weights

    def hopeful(*args):
        matched = honest(*args)
        matched.objective[-1] *= 0.99
        return matched

    monkeypatch.setattr(aligning, "align_weights", hopeful)
    with pytest.raises(ModelError, match=r"not at the .* that matching found"):
        onebasin.match(*emptied, tmp_path / "out", symmetry=level, max_sweeps=2)
    assert not (tmp_path / "out").exists()


def test_the_bound_holds_for_the_product_of_all_sweeps_and_rounds(tiny):
    """Sources in which a direction is almost empty ask for ever larger maps, a little at every visit."""
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    sources = [tiny("GPT2LMHeadModel", "full", number)[1] for number in (1, 2)]
    groups = acting_groups(signature, "invertible", parts=["attention"])
    bound = 1.2
    limited = {root: Invertible(bound) if isinstance(group, Invertible) else group for root, group in groups.items()}
    pair = match_weights(signature, lambda role: (anchor[role], sources[0][role]), limited, Weights(max_sweeps=20))
    models = [tensors.__getitem__ for tensors in (anchor, *sources)]
    three = match_universe([signature] * 3, models, [limited] * 3, Weights(max_sweeps=3), roles=list(anchor), centre=0)
    found = [pair.alignment, *three.alignments[1:]]
    spreads = []
    for alignment in found:
        for root, group in limited.items():
            if isinstance(group, Invertible):
                element = alignment.elements[root]
                norms = [torch.linalg.matrix_norm(element.of(dual)) for dual in (False, True)]
                spreads.append(float((norms[0] * norms[1]).max()) / element.matrix.shape[-1])
                eye = torch.eye(element.matrix.shape[-1], dtype=torch.float64).expand_as(element.matrix)
                torch.testing.assert_close(element.matrix.mT @ element.dual, eye, rtol=0, atol=1e-10)
    assert max(spreads) <= bound * (1 + 1e-6)
    assert max(spreads) > 1.1
