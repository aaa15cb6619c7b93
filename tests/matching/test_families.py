# SPDX-License-Identifier: Apache-2.0
"""Planted recovery where heads are grouped, turned by position, normalized, fused, or run beside the FFN."""

from __future__ import annotations

from functools import partial

import pytest
import zoo
from elements import apply, random_alignment, squared

from onebasin.matching import Weights, match_weights
from onebasin.symmetry import Alignment, acting_groups


@pytest.fixture
def case_with(monkeypatch):
    """A case with other values in its config, under a name of its own."""

    def add(case, **changes):
        monkeypatch.setitem(zoo.CASES, f"{case}-changed", partial(zoo.CASES[case], **changes))
        return f"{case}-changed"

    return add


CASES = ["LlamaForCausalLM", "LlamaForCausalLM-tied", "LlamaForCausalLM-biases", "LlamaForCausalLM-mha",
         "LlamaForCausalLM-mqa", "Qwen3ForCausalLM", "Phi3ForCausalLM-partial", "GemmaForCausalLM", "Gemma2ForCausalLM",
         "Gemma3ForCausalLM", "Olmo2ForCausalLM", "GPTNeoXForCausalLM", "GPTNeoXForCausalLM-serial", "GPTJForCausalLM",
         "FalconForCausalLM", "FalconForCausalLM-groups", "StableLmForCausalLM-parallel", "CohereForCausalLM",
         "StableLmForCausalLM-qk-layernorm", "OPTForCausalLM", "OPTForCausalLM-weightless-norms", "BloomForCausalLM",
         "MptForCausalLM", "Wav2Vec2ForCTC-narrow-adapter"]  # fmt: skip
EXPERTS = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM",
           "DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM-groups"]  # fmt: skip


def planted(tiny, case, level, rescale):
    """Relative distance to the anchor of a scrambled copy, before and after matching."""
    signature, anchor = tiny(case, "full" if level == "permutation" else level)
    groups = acting_groups(signature, level, rescale=rescale)
    source = apply(signature, random_alignment(signature, groups), anchor)
    found = match_weights(signature, lambda role: (anchor[role], source[role]), groups)
    moved = apply(signature, found.alignment, source)
    norm = squared(anchor, {role: 0 * tensor for role, tensor in anchor.items()})
    for before, after in zip(found.objective, found.objective[1:], strict=False):
        assert after <= before * (1 + 1e-9)
    return (squared(anchor, source) / norm) ** 0.5, (squared(anchor, moved) / norm) ** 0.5


LEVELS = ["paper", "permutation", "orthogonal", "full"]
# Every case at every level; every case and every level with and without scales.
COVERED = [(case, level, ("none", "joint")[(i + j) % 2]) for i, case in enumerate(CASES)
           for j, level in enumerate(LEVELS)]  # fmt: skip
# Every second level, in turn: what these models have is held at all levels by their neighbours.
EXPERTS_COVERED = [(case, level) for i, case in enumerate(EXPERTS) for level in LEVELS[i % 2 :: 2]]


@pytest.mark.parametrize(("case", "level", "rescale"), COVERED)
def test_what_was_scrambled_is_recovered(tiny, case, level, rescale):
    before, after = planted(tiny, case, level, rescale)
    assert before > 0.1
    assert after < 1e-5


@pytest.mark.parametrize(("case", "level"), EXPERTS_COVERED)
def test_scrambled_experts_are_recovered(tiny, case, level):
    """Experts, the neurons inside each, and a sign or a factor for each neuron: one optimum."""
    before, after = planted(tiny, case, level, "joint")
    assert before > 0.1
    assert after < 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM",
                                  "GPTNeoXForCausalLM", "Qwen2MoeForCausalLM"])  # fmt: skip
def test_between_strangers_the_objective_is_the_distance_and_never_increases(tiny, case, level):
    signature, anchor = tiny(case, "full")
    _, source = tiny(case, "full", number=1)
    groups = acting_groups(signature, level, rescale="joint")
    found = match_weights(
        signature, lambda role: (anchor[role], source[role]), groups, Weights(max_sweeps=4), start=Alignment()
    )
    for before, after in zip(found.objective, found.objective[1:], strict=False):
        assert after <= before * (1 + 1e-12)
    gain = squared(anchor, source) - squared(anchor, apply(signature, found.alignment, source))
    assert found.objective[0] - found.objective[-1] == pytest.approx(gain, rel=1e-9)
    assert gain > 0


@pytest.mark.parametrize("level", ["permutation", "orthogonal", "full"])
def test_scrambled_experts_of_one_neuron_are_recovered(tiny, case_with, level):
    before, after = planted(tiny, case_with("Qwen3MoeForCausalLM", moe_intermediate_size=1), level, "joint")
    assert before > 0.1
    assert after < 1e-5


@pytest.mark.parametrize("level", ["permutation", "orthogonal", "full"])
@pytest.mark.parametrize("neurons", [1, 10])
def test_scrambled_neurons_of_a_single_expert_are_recovered(tiny, case_with, level, neurons):
    one = case_with("MixtralForCausalLM", num_local_experts=1, num_experts_per_tok=1, intermediate_size=neurons)
    before, after = planted(tiny, one, level, "joint")
    assert before > 0.1
    assert after < 1e-5
