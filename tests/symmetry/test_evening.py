# SPDX-License-Identifier: Apache-2.0
"""Even norms let the stream of post-norm models rotate: exactly, once they are even; and what reads a norm's output
makes up for its weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elements import random_alignment
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CASES, save

import onebasin
from onebasin.models import Canonical, Folder, LazyTensors, Model, Rewritten, write_model
from onebasin.running import compare_rewritten
from onebasin.running.trial import TOLERANCE, departure_on_twin
from onebasin.symmetry import acting_groups
from onebasin.symmetry.gauge.canonical import plan
from onebasin.symmetry.gauge.evening import evened, uneven

POST_NORM = [
    "BertForSequenceClassification", "BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "DebertaForMaskedLM",
    "DebertaV2ForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM", "XLNetLMHeadModel", "Gemma2ForCausalLM",
    "Olmo2ForCausalLM",
    "BartForConditionalGeneration",
]  # fmt: skip


def even(folder: Path) -> Canonical:
    return Canonical(Folder(folder), torch.float64, even=True)


@pytest.mark.parametrize("case", POST_NORM)
def test_streams_of_models_with_even_norms_move_exactly(case: str, tmp_path: Path) -> None:
    form = even(save(CASES[case]().double(), tmp_path / "model"))
    kinds = form.signature.kinds
    assert form.even and any(form.base.signature.kinds.get(root) != kind for root, kind in kinds.items())
    moved = Rewritten(
        form, random_alignment(form.signature, acting_groups(form.signature, "invertible")), torch.float64
    )
    found = compare_rewritten(form.origin, moved, form, dtype=torch.float64)
    assert found.relative_difference < 1e-9
    assert departure_on_twin(form) <= TOLERANCE


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification", "Wav2Vec2ForCTC"])
def test_a_stream_that_can_rotate_already_or_not_even_so_keeps_its_norms(case: str, tmp_path: Path) -> None:
    folder = Folder(save(CASES[case](), tmp_path / "model"))
    assert plan(folder.signature, even=True).uneven is None
    given, form = Canonical(folder), Canonical(folder, even=True)
    assert all(torch.equal(form.read(role), given.read(role)) for role in given.signature.tensors)


def written(view: Model, where: Path) -> Path:
    write_model(where, LazyTensors.of_model(view, torch.float64), view, overwrite=False, dtype=None)
    return where


@pytest.mark.parametrize("case", ["BertForMaskedLM", "Gemma2ForCausalLM"])
def test_a_model_whose_norms_are_even_keeps_its_function(case: str, tmp_path: Path) -> None:
    folder = save(CASES[case]().double(), tmp_path / "model")
    signature = Folder(folder).signature
    names = {entry.name for entry in signature.tensors.values() if uneven(signature, entry)}
    weights = {name: torch.full_like(x, 0.7) if name in names else x
               for name, x in load_file(folder / "model.safetensors").items()}  # fmt: skip
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = compare_rewritten(Folder(folder), even(folder), dtype=torch.float64)
    assert found.relative_difference < 1e-9


def test_readers_make_up_for_the_weight_of_a_norm(tmp_path: Path) -> None:
    """W' (m n + b) + c' = W (g * n + b) + c for every n."""
    model = Folder(save(CASES["BertForSequenceClassification"]().double(), tmp_path / "model"))
    norm, reader = "encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.intermediate.dense"

    def read(view: Folder | Canonical, n: Tensor) -> Tensor:
        gain, bias, matrix, constant = (
            view.read(role, torch.float64)
            for role in (f"{norm}.weight", f"{norm}.bias", f"{reader}.weight", f"{reader}.bias")
        )
        return matrix @ (gain * n + bias) + constant

    n = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n = n - n.mean()  # as a LayerNorm puts out
    form = Canonical(model, torch.float64, even=True)
    gains = form.read(f"{norm}.weight", torch.float64)
    assert torch.equal(gains, gains[:1].expand(12)) and len(model.read(f"{norm}.weight").unique()) > 1
    assert torch.allclose(read(form, n), read(model, n), atol=1e-10)


def test_a_rotated_stream_is_found_again(tmp_path: Path) -> None:
    """Planted: the copy's stream is rotated, which no exact symmetry of BERT undoes."""
    folder = save(CASES["BertForSequenceClassification"]().double(), tmp_path / "model")
    form = even(folder)
    groups = acting_groups(form.signature, "orthogonal", parts=["stream"])
    moved = Rewritten(form, random_alignment(form.signature, groups), torch.float64)
    copy = written(moved, tmp_path / "copy")
    base = written(form, tmp_path / "even")
    how = {"match": "full", "precision": "float64", "verify": "outputs"}
    exact = onebasin.match(copy, base, tmp_path / "exact", **how)
    found = onebasin.match(copy, base, tmp_path / "found", even=True, **how)
    assert found.distance_after < 1e-6 * found.distance_before
    assert exact.distance_after > 0.1 * exact.distance_before
    assert found.max_output_difference < 1e-6


def test_levels_whose_streams_stay_refuse_even_norms() -> None:
    with pytest.raises(ValueError, match="even norms let streams rotate, which --match paper does not"):
        onebasin.match("a", "b", even=True)


def test_even_norms_are_those_behind_a_sum(tmp_path: Path) -> None:
    signature = Folder(save(CASES["GPT2LMHeadModel"](), tmp_path / "model")).signature
    assert evened(signature) is None
    assert not any(uneven(signature, entry) for entry in signature.tensors.values())
