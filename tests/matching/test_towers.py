# SPDX-License-Identifier: Apache-2.0
"""Planted recovery with two stacks, heads shared by all layers, LayerScale, convolutions before and in the stream."""

from __future__ import annotations

import pytest
from elements import apply, random_alignment, squared

from onebasin.matching import match_weights
from onebasin.symmetry import acting_groups

CASES = ["T5ForConditionalGeneration", "SwinForImageClassification-three",
         "T5ForConditionalGeneration-gated", "BartForConditionalGeneration",
         "MBartForConditionalGeneration", "WhisperForConditionalGeneration", "CLIPModel", "SiglipModel",
         "Dinov2ForImageClassification", "Dinov2ForImageClassification-swiglu", "BeitForMaskedImageModeling-shared",
         "ModernBertForMaskedLM-biases", "Wav2Vec2ForCTC", "HubertForCTC-stable",
         "XLNetLMHeadModel"]  # fmt: skip


@pytest.mark.parametrize("level", ["permutation", "full"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_scrambled_is_recovered(tiny, case, level):
    signature, anchor = tiny(case, "full")
    groups = acting_groups(signature, level, rescale="joint")
    source = apply(signature, random_alignment(signature, groups), anchor)
    found = match_weights(signature, lambda role: (anchor[role], source[role]), groups)
    moved = apply(signature, found.alignment, source)
    norm = squared(anchor, {role: 0 * tensor for role, tensor in anchor.items()})
    assert squared(anchor, source) > 0.01 * norm
    assert squared(anchor, moved) < 1e-10 * norm
