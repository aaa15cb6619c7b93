# SPDX-License-Identifier: Apache-2.0
"""Weight matching: planted recovery, descent, optimality, and what stays untouched."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from elements import Tensors, apply, random_alignment, squared

import onebasin
from onebasin.matching import Run, Weights, match_weights
from onebasin.models.distance import squared_distance
from onebasin.running import twins
from onebasin.running.trial import scrambling
from onebasin.symmetry import LEVELS, Alignment, acting_groups, read_table, resolve
from onebasin.symmetry.groups.elements import Monomial

CASES = ["BertForSequenceClassification", "GPT2LMHeadModel", "ViTForImageClassification", "RobertaForMaskedLM"]
PRE_NORM = ["GPT2LMHeadModel", "ViTForImageClassification"]


def pairs(anchor: Tensors, source: Tensors):
    return lambda role: (anchor[role], source[role])


@pytest.mark.parametrize("rescale", ["none", "joint"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_scrambled_at_paper_level_is_recovered(tiny, case, rescale):
    signature, anchor = tiny(case)
    groups = acting_groups(signature, "paper", rescale=rescale)
    source = apply(signature, random_alignment(signature, groups), anchor)
    assert squared(anchor, source) > 1
    found = match_weights(signature, pairs(anchor, source), groups)
    assert squared(anchor, apply(signature, found.alignment, source)) < 1e-18 * squared(anchor, anchor) + 1e-16


@pytest.mark.parametrize("level", ["permutation", "full"])
@pytest.mark.parametrize("case", PRE_NORM)
def test_what_was_scrambled_in_all_spaces_is_recovered(tiny, case, level):
    signature, anchor = tiny(case, "full")
    groups = acting_groups(signature, level, rescale="joint")
    assert "stream" in groups
    source = apply(signature, random_alignment(signature, groups), anchor)
    found = match_weights(signature, pairs(anchor, source), groups)
    after = squared(anchor, apply(signature, found.alignment, source))
    assert after < 1e-10 * sum(float(t.square().sum()) for t in anchor.values())


@pytest.mark.parametrize("case", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_a_permuted_stream_of_a_post_norm_model_is_recovered(tiny, case):
    signature, anchor = tiny(case)
    groups = acting_groups(signature, "full", rescale="joint")
    source = apply(signature, random_alignment(signature, groups), anchor)
    found = match_weights(signature, pairs(anchor, source), groups)
    after = squared(anchor, apply(signature, found.alignment, source))
    assert after < 1e-10 * sum(float(t.square().sum()) for t in anchor.values())


@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal", "full"])
@pytest.mark.parametrize("case", PRE_NORM)
def test_the_objective_is_the_distance_and_never_increases(tiny, case, level):
    signature, anchor = tiny(case, "full")
    _, source = tiny(case, "full", number=1)
    groups = acting_groups(signature, level, rescale="joint")
    found = match_weights(signature, pairs(anchor, source), groups)
    for before, after in zip(found.objective, found.objective[1:], strict=False):
        assert after <= before * (1 + 1e-12)
    gain = squared(anchor, source) - squared(anchor, apply(signature, found.alignment, source))
    assert found.before - found.objective[-1] == pytest.approx(gain, rel=1e-9)
    assert gain > 0


def test_a_sweep_measures_every_tensor_once(tiny, monkeypatch):
    """On the way, where the sweep reads it first; distances that are out of date at once are not measured."""
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    _, source = tiny("GPT2LMHeadModel", "full", number=1)
    measured = []

    def counting(a, b):
        measured.append(a)
        return squared_distance(a, b)

    monkeypatch.setattr("onebasin.matching.coordinate_descent.squared_distance", counting)
    found = match_weights(signature, pairs(anchor, source), acting_groups(signature, "full"), run=Run(workers=1))
    counted = sum(entry.alias is None for entry in signature.tensors.values())
    assert len(found.apart) == counted and len(found.objective) > 3
    assert len(measured) == counted * (1 + len(found.objective))  # and once before anything moves


@pytest.mark.parametrize("level", ["paper", "orthogonal"])
def test_a_second_run_changes_nothing(tiny, level):
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    _, source = tiny("GPT2LMHeadModel", "full", number=1)
    groups = acting_groups(signature, level)
    once = match_weights(signature, pairs(anchor, source), groups, Weights(tolerance=1e-13, max_sweeps=500))
    moved = apply(signature, once.alignment, source)
    twice = match_weights(signature, pairs(anchor, moved), groups, Weights(tolerance=1e-13), start=Alignment())
    assert twice.objective[-1] == pytest.approx(twice.objective[0], rel=1e-9)


def test_paper_matching_beats_random_elements_and_brute_force(tiny):
    signature, anchor = tiny("BertForSequenceClassification")
    _, source = tiny("BertForSequenceClassification", number=1)
    groups = acting_groups(signature, "paper", rescale="joint")
    found = match_weights(signature, pairs(anchor, source), groups)
    best = squared(anchor, apply(signature, found.alignment, source))
    for seed in range(100):
        random = random_alignment(signature, groups, seed)
        assert best <= squared(anchor, apply(signature, random, source))


def test_neurons_against_all_permutations(tiny):
    signature, anchor = tiny("BertModel")
    _, source = tiny("BertModel", number=1)
    root = "encoder.layer.0.ffn"
    found = match_weights(signature, pairs(anchor, source), {root: acting_groups(signature, "paper")[root]})
    best = squared(anchor, apply(signature, found.alignment, source))
    n = signature.sizes[root]
    generator = torch.Generator().manual_seed(0)
    fixed = torch.randperm(n, generator=generator)[: n - 6].tolist()  # brute force over the other six
    index = found.alignment.elements[root].index
    free = [i for i in range(n) if i not in fixed]
    for order in permutations(free):
        other = index.clone()
        other[free] = index[list(order)]
        moved = apply(signature, Alignment({root: Monomial(other)}), source)
        assert best <= squared(anchor, moved) + 1e-12


def test_rescaling_joint_is_never_worse_than_after_never_worse_than_none(tiny):
    signature, anchor = tiny("GPT2LMHeadModel")
    _, source = tiny("GPT2LMHeadModel", number=1)
    ends = [
        match_weights(signature, pairs(anchor, source), acting_groups(signature, "paper", rescale=rescale)).objective[
            -1
        ]
        for rescale in ("joint", "after", "none")
    ]
    assert ends[0] <= ends[1] * (1 + 1e-12) <= ends[2] * (1 + 1e-12)


def test_only_the_chosen_layers_and_parts_move(tiny):
    signature, anchor = tiny("BertModel")
    _, source = tiny("BertModel", number=1)
    groups = acting_groups(signature, "paper", parts=["ffn"], layers=[1])
    assert set(groups) == {"encoder.layer.1.ffn"}
    found = match_weights(signature, pairs(anchor, source), groups)
    moved = apply(signature, found.alignment, source)
    changed = {role for role in source if not torch.equal(source[role], moved[role])}
    assert changed == set(signature.touching["encoder.layer.1.ffn"])


@pytest.mark.parametrize("parts", [["attention"], ["ffn"], ["stream"]])
@pytest.mark.parametrize("level", LEVELS)
def test_at_every_level_only_what_was_chosen_moves(tiny, level, parts):
    signature, anchor = tiny("GPT2LMHeadModel", level)
    _, source = tiny("GPT2LMHeadModel", level, number=1)
    groups = acting_groups(signature, level, parts=parts, layers=[1])
    found = match_weights(signature, pairs(anchor, source), groups)
    moved = apply(signature, found.alignment, source)
    changed = {role for role in source if not torch.equal(source[role], moved[role])}
    assert changed <= {role for root in groups for role in signature.touching[root]}
    assert all(signature.spaces[root].layer in (1, None) for root in groups)
    assert bool(groups) == (level != "paper" or parts != ["stream"])
    assert squared(anchor, moved) <= squared(anchor, source)


def test_tensor_weights_change_what_counts(tiny):
    signature, anchor = tiny("BertModel")
    _, source = tiny("BertModel", number=1)
    groups = acting_groups(signature, "paper", parts=["attention"])

    plain = match_weights(signature, pairs(anchor, source), groups)
    weighted = match_weights(signature, pairs(anchor, source), groups, Weights(tensor_weights={".key.": 100.0}))
    key = "encoder.layer.0.attention.self.key.weight"
    distances = [
        float((anchor[key] - found.alignment.apply(signature, key, source[key])).norm()) for found in (plain, weighted)
    ]
    assert distances[1] < distances[0]


def test_relative_distances_are_those_over_the_roots_of_both_norms(tiny):
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    _, source = tiny("GPT2LMHeadModel", "full", number=1)
    groups = acting_groups(signature, "orthogonal")
    found = match_weights(signature, pairs(anchor, source), groups, Weights(relative=True))
    moved = apply(signature, found.alignment, source)
    for tensors, value in ((source, found.before), (moved, found.objective[-1])):
        terms = [
            float((anchor[role] - tensors[role]).square().sum())
            / (float(anchor[role].norm() * source[role].norm()) ** 0.5 or 1.0)
            for role in anchor
            if any(signature.root[leaf.space] in groups for leaf in signature.leaves(signature.tensors[role]))
        ]
        assert value == pytest.approx(sum(terms), rel=1e-9)


def test_more_starts_never_end_higher(tiny):
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    _, source = tiny("GPT2LMHeadModel", "full", number=1)
    groups = acting_groups(signature, "orthogonal")
    one, four = (match_weights(signature, pairs(anchor, source), groups, Weights(starts=starts)) for starts in (1, 4))
    assert four.objective[-1] <= one.objective[-1]


@pytest.mark.parametrize("level, rescale", [("paper", "after"), ("paper", "joint"), ("full", "joint")])
def test_single_precision_has_the_same_bits_for_any_number_of_workers(tiny, level, rescale):
    signature, anchor = tiny("GPT2LMHeadModel", "full")
    _, source = tiny("GPT2LMHeadModel", "full", number=1)
    groups = acting_groups(signature, level, rescale=rescale)
    anchor, source = ({role: tensor.float() for role, tensor in each.items()} for each in (anchor, source))
    read = pairs(anchor, source)
    one, two, five = (match_weights(signature, read, groups, Weights(max_sweeps=3), run=Run(n)) for n in (1, 2, 5))
    for other in (two, five):
        assert other.objective == one.objective
        moved = apply(signature, other.alignment, source)
        assert all(torch.equal(tensor, moved[role]) for role, tensor in apply(signature, one.alignment, source).items())


def test_single_precision_rotates_as_double_does(tiny):
    """The certified iteration behind float32 rotations ends where the SVD behind float64 ends."""
    signature, anchor = tiny("BertForMaskedLM")
    _, source = tiny("BertForMaskedLM", number=1)
    groups = acting_groups(signature, "paper", rescale="joint", parts=("attention",))
    exact = match_weights(signature, pairs(anchor, source), groups)
    single = match_weights(signature, lambda role: (anchor[role].float(), source[role].float()), groups)
    reached = squared(anchor, apply(signature, single.alignment, source))
    assert reached == pytest.approx(squared(anchor, apply(signature, exact.alignment, source)), rel=1e-6)


def test_a_start_whose_tensors_do_not_touch_every_space_of_a_block(tmp_path: Path) -> None:
    """In Gemma 3n, factors of a gate touch only tensors whose other axis is not anchored."""
    model = twins.build("gemma3n_text")[0]
    for seed in (0, 1):
        twins.random_model(model.config, type(model), seed).save_pretrained(tmp_path / str(seed))
    found = onebasin.match(tmp_path / "1", tmp_path / "0", tmp_path / "out", match="full")
    assert found["distance_after"] < found["distance_before"] and found["max_output_difference"] < 1e-3


def test_several_factors_of_one_neuron_do_not_count_on_each_other() -> None:
    """The gates around a short convolution: the best factor of one depends on that of the other."""
    table = """
    family gates
    spaces
        stream  fixed
        width   fixed
        ffn     permutation ffn
        into    factor      ffn  per ffn
        out     factor      ffn  per ffn
        taps    factor      ffn  per ffn
    tensors
        gates   [(ffn into) | (ffn out)] stream'
        conv    (ffn taps) 1 width
        down    stream (ffn into' out' taps')
    """
    shapes = {"gates": (12, 4), "conv": (6, 1, 3), "down": (4, 6)}
    signature = resolve(read_table(dedent(table)), shapes, {})
    generator = torch.Generator().manual_seed(0)
    anchor, source = (
        {role: torch.randn(shape, generator=generator, dtype=torch.float64) for role, shape in shapes.items()}
        for _ in range(2)
    )
    groups = acting_groups(signature, "full")
    found = match_weights(signature, pairs(anchor, source), groups)
    apart = squared(anchor, apply(signature, found.alignment, source))
    assert found.objective[-1] == pytest.approx(apart, rel=1e-9) and apart < found.before


RECURRENCE = """
family recurrence
spaces
    tokens  fixed
    stream  linear      stream
    ffn     permutation ffn
tensors
    embed   tokens stream
    mix     stream stream'
    into    ffn stream'
    loop    ffn ffn'
    out     stream ffn'
"""


@pytest.mark.parametrize("level", ["paper", "permutation", "full"])
def test_a_space_on_both_axes_of_a_tensor_never_raises_the_distance(level: str) -> None:
    """W -> Q W Q' is no linear function of Q, so the best Q for the first-order change may be worse than none."""
    shapes = {"embed": (7, 4), "mix": (4, 4), "into": (5, 4), "loop": (5, 5), "out": (4, 5)}
    signature = resolve(read_table(dedent(RECURRENCE)), shapes, {})
    groups = acting_groups(signature, level, rescale="joint")
    generator = torch.Generator().manual_seed(0)

    def drawn() -> dict[str, torch.Tensor]:
        return {role: torch.randn(shape, generator=generator, dtype=torch.float64) for role, shape in shapes.items()}

    for _ in range(10):
        anchor, source = drawn(), drawn()
        found = match_weights(signature, pairs(anchor, source), groups)
        for before, after in zip(found.objective, found.objective[1:], strict=False):
            assert after <= before * (1 + 1e-12)
        gain = squared(anchor, source) - squared(anchor, apply(signature, found.alignment, source))
        assert found.before - found.objective[-1] == pytest.approx(gain, rel=1e-9) and gain >= 0
        planted = scrambling(signature, level)
        back = match_weights(signature, pairs(anchor, apply(signature, planted, anchor)), groups)
        assert back.objective[-1] < 1e-9 * back.before
