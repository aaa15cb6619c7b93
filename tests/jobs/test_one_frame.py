# SPDX-License-Identifier: Apache-2.0
"""One frame for several models: who is its anchor, and that copies are checked as they would load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import folder, model
from zoo import save

import onebasin
from onebasin.jobs.aligning import align_all
from onebasin.jobs.frame import in_one_frame
from onebasin.jobs.options import Options
from onebasin.jobs.writing import verified
from onebasin.models import Folder, ModelError, Rewritten, View
from onebasin.running import compare, compare_rewritten
from onebasin.symmetry import Alignment
from onebasin.symmetry.groups.elements import Monomial


@pytest.fixture
def widths(tmp_path: Path) -> list[Folder]:
    return [Folder(folder(tmp_path / str(seed), "GPT2LMHeadModel", seed, apart=0.3, n_embd=width, n_head=2))
            for seed, width in enumerate((16, 24, 16))]  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2)])
def test_the_widest_model_is_the_anchor(widths: list[Folder], order: tuple[int, ...]) -> None:
    models = [widths[number] for number in order]
    frame = in_one_frame(models, None, "orthogonal", Options(symmetry="orthogonal", max_sweeps=2), None)
    assert frame.centre == order.index(1)
    assert frame.common.roles
    for role in frame.common.roles:
        assert len({model.signature.tensors[role].shape for model in frame.models}) == 1
    aligned = align_all(frame.models, frame.centre, "orthogonal", Options(symmetry="orthogonal", max_sweeps=2), None)
    differences = frame.differences(aligned.models, Options(), None)
    assert len(differences) == len(aligned.found) == len(frame.others) == len(models) - 1
    assert all(difference is not None and difference < 1e-3 for difference in differences)


def test_a_merge_file_takes_the_widest_model_as_its_anchor(widths: list[Folder], tmp_path: Path) -> None:
    recipe = tmp_path / "merge.yml"
    named = "".join(f"  - model: {model.name}\n    parameters: {{weight: 0.5}}\n" for model in widths[:2])
    recipe.write_text(f"merge_method: linear\nmodels:\n{named}align: {{symmetry: orthogonal, anchor: auto}}\n")
    assert onebasin.merge_config(recipe, tmp_path / "out", verdict=False)["anchor"] == 1


def test_without_matching_nothing_moves(widths: list[Folder]) -> None:
    frame = in_one_frame([widths[0], widths[2]], 1, "none", Options(), None)
    assert frame.models == [widths[0], widths[2]] and frame.centre == 1
    aligned = align_all(frame.models, frame.centre, "none", Options(), None)
    assert frame.differences(aligned.models, Options(), None) == [None] and not aligned.found[0].alignment.elements


def test_what_is_not_the_same_function_is_refused(widths: list[Folder]) -> None:
    model = widths[0]
    torch.manual_seed(0)
    ffn = next(root for root in model.signature.spaces if root.endswith("ffn"))
    size = model.signature.spaces[ffn].size
    right = Alignment({ffn: Monomial(torch.randperm(size))})
    assert (verified(model, Rewritten(model, right), Options(), None)[1] or 0) < 1e-4
    wrong = Alignment({ffn: Monomial(torch.randperm(size), torch.full((size,), 2.0))})  # GELU does not scale
    with pytest.raises(ModelError, match="differs from the original"):
        verified(model, Rewritten(model, wrong), Options(), None)


def test_what_float32_would_round_away_is_computed_in_float64(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        one = model("LlamaForCausalLM", seed, apart=0.5)
        half = one.config.hidden_size // 2
        stream = [one.model.embed_tokens.weight.T]
        stream += [
            part for layer in one.model.layers for part in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
        ]
        with torch.no_grad():  # the head sees the small half of the stream alone, which a rotation mixes with the other
            for tensor in stream:
                tensor[:half] *= 1e-4
            one.lm_head.weight[:, half:] = 0
        save(one, tmp_path / name)
    found = onebasin.match(tmp_path / "a", tmp_path / "b", tmp_path / "out", match="full", dtype="float64")
    assert compare(tmp_path / "a", tmp_path / "out", dtype=torch.float64).relative_difference < 1e-6
    assert any("computed in float64" in note for note in found["notes"])


def test_a_copy_that_lacks_a_tensor_is_refused(widths: list[Folder]) -> None:
    model = widths[0]
    assert compare_rewritten(model, Rewritten(model, Alignment())).max_difference == 0
    *kept, _ = model.signature.tensors
    short = replace(model.signature, tensors={role: model.signature.tensors[role] for role in kept})
    with pytest.raises(ModelError, match="lack"):
        compare_rewritten(model, View(model, short))
