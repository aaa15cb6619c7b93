# SPDX-License-Identifier: Apache-2.0
"""Law 1: a random element in every space leaves the function of every model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from rewritten import difference, moving_alignment, outputs_of, read_all, run, with_unit_norms, write
from torch import Tensor

from onebasin.models.folder import Folder
from onebasin.symmetry import Alignment, Entry, Signature
from onebasin.symmetry.groups.elements import Monomial

Saved = Callable[[str], Folder]

# Spaces in which nothing may ever act: ids, pixels, distances and classes mean something by themselves.
FIXED = {"vocab", "position", "type", "task", "relation", "label", "memory", "distance", "tap", "channel", "slope",
         "pixel", "output", "frame", "patch", "register", "shared", "hidden", "embedded", "code", "value",
         "quantised", "feature", "adapter", "adapter_tap",
         "wave", "segment",
         *(f"tap{layer}" for layer in range(7))}  # fmt: skip


HEADS = {"head", "kv", "group"}


def held_in(dtype: torch.dtype, checkpoint: Folder) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The model's tensors as `dtype` holds them, and its outputs."""
    tensors = {role: value.to(dtype).double() for role, value in read_all(checkpoint).items()}
    return tensors, outputs_of(checkpoint, tensors)


def relative_error(
    level: str,
    checkpoint: Folder,
    tensors: dict[str, Tensor],
    before: list[Tensor],
    dtype: torch.dtype = torch.float64,
    folder: Path | None = None,
) -> float:
    """Largest difference of outputs over their scale; weights held in `dtype`, models run in float64.

    With a folder, both models are written to it and loaded as users load them: a class may compute its own constants
    with another rounding then.
    """
    signature = checkpoint.signature
    if level == "widest":
        tensors = with_unit_norms(signature, tensors)
    alignment = moving_alignment(signature, level)
    rewritten = {role: alignment.apply(signature, role, value) for role, value in tensors.items()}
    for role, entry in signature.tensors.items():
        acts = any(signature.root[leaf.space] in alignment.elements for leaf in signature.leaves(entry))
        trivial = entry.diagonal and not moves_norm(signature, entry, alignment, tensors[role])
        assert trivial or acts != torch.equal(rewritten[role], tensors[role]), f"{role}: acts is {acts}"
    stored = {role: value.to(dtype) for role, value in rewritten.items()}
    case = checkpoint.folder.name
    if folder:
        before = run(case, write(folder / "before", checkpoint, tensors))
        after = run(case, write(folder / "after", checkpoint, stored))
    else:
        after = outputs_of(checkpoint, stored)
    assert before
    return difference(before, after)


def moves_norm(signature: Signature, entry: Entry, alignment: Alignment, weight: Tensor) -> bool:
    """Whether a norm's weight, or LayerScale, is permuted: signs leave it alone, and all that is one number."""
    found = (alignment.elements.get(signature.root[leaf.space]) for leaf in signature.leaves(entry))
    permutes = any(isinstance(g, Monomial) and not Monomial(g.index).is_identity() for g in found)
    return permutes and not bool((weight == weight.flatten()[0]).all())


@pytest.mark.parametrize("case", zoo.CASES)
def test_a_random_element_in_every_space_keeps_the_function(case: str, saved: Saved, tmp_path: Path) -> None:
    model = saved(case), *held_in(torch.float64, saved(case))
    errors = {level: relative_error(level, *model) for level in ("paper", "permutation")}
    errors["widest"] = relative_error("widest", *model, folder=tmp_path)
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("case", zoo.one_of_each_family())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_up_to_the_rounding_of_stored_weights(case: str, dtype: torch.dtype, saved: Saved) -> None:
    """A permutation moves numbers and rounds none; a rotation rounds every weight once; layers amplify it."""
    model = saved(case), *held_in(dtype, saved(case))
    assert relative_error("permutation", *model, dtype) < 1e-9
    assert relative_error("paper", *model, dtype) < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", zoo.CASES)
def test_everything_moves_but_what_means_something_by_itself(case: str, saved: Saved) -> None:
    signature = saved(case).signature
    for root, kind in signature.kinds.items():
        members = [signature.spaces[key] for key in signature.members[root]]
        leaves_the_model = any(space.output or (space.name, space.kind) == ("final", "fixed") for space in members)
        name = signature.spaces[root].name
        normed = "-qk-" in case and name in ("qk", "rope")
        sloped = "-alibi" in case and name in HEADS
        outside = "CausalLM" in case and name == "encoder_stream"  # a decoder alone reads what others encoded
        if kind in ("fixed", "rows", "labels") and not leaves_the_model and signature.sizes[root]:
            assert name in FIXED or normed or sloped or outside
    still = ("fixed", "rows", "labels")
    moving = {
        ("ffn" if space.name == "dense" else space.name, space.layer)
        for key, space in signature.spaces.items()
        if signature.kinds[signature.root[key]] not in still
    }
    present = {space.name for space in signature.spaces.values()}
    expected = present & {"head", "kv", "qk", "rope", "rope_half", "flat", "vo", "ffn"}
    if "-qk-" in case:
        expected -= {"qk", "rope"}  # a norm that removes the mean and rotary embeddings leave nothing
    if "-alibi" in case:
        expected -= HEADS  # every head has a slope of its own
    assert len(expected) == 4 - (not expected & HEADS) - ("-qk-" in case)
    for layer in signature.layers:
        assert {(name, layer) for name in expected} <= moving


@pytest.mark.parametrize(
    ("case", "space", "kind"),
    [
        ("BertForMaskedLM", "stream", "permutation"),
        ("BertForMaskedLM", "encoder.layer.0.qk", "linear"),
        ("BertForMaskedLM", "encoder.layer.0.ffn", "permutation"),
        ("BertForMaskedLM-relu", "encoder.layer.0.ffn", "relu"),
        ("BertForSequenceClassification", "pooled", "odd"),
        ("DistilBertForSequenceClassification", "pooled", "relu"),
        ("GPT2LMHeadModel", "stream", "ones"),
        ("ViTForImageClassification", "stream", "ones"),
        # hidden states that leave a model without a head stay where they are
        ("BertModel", "stream", "fixed"),
        ("GPT2Model", "stream", "fixed"),
        # a narrow embedding rotates, unless a masked-language head shares the table and puts a GELU on it
        ("AlbertModel", "embedding", "ones"),
        ("AlbertForMaskedLM", "embedding", "permutation"),
        ("AlbertForMaskedLM-untied", "embedding", "ones"),
        ("ElectraModel", "embedding", "ones"),
        ("ElectraForMaskedLM", "embedding", "permutation"),
        ("DebertaV2ForTokenClassification-narrow", "embedding", "linear"),
        # relative positions live apart where maps of their own read them
        ("DebertaV2ForTokenClassification-own-keys", "relative", "linear"),
        ("DebertaV2ForTokenClassification-own-keys-norm", "relative", "ones"),
        ("DebertaModel", "relative", "linear"),
        ("DebertaForTokenClassification-narrow", "embedding", "linear"),
    ],
)
def test_what_may_act_follows_from_what_touches_a_space(case: str, space: str, kind: str, saved: Saved) -> None:
    signature = saved(case).signature
    assert signature.kinds[signature.root[space]] == kind
