# SPDX-License-Identifier: Apache-2.0
"""Many models in one frame: cycles close, the scatter falls, no star is better."""

from __future__ import annotations

import weakref

import pytest
import torch
from elements import apply, squared

from onebasin.matching import Run, Weights, match_universe
from onebasin.matching.universe import scatter
from onebasin.symmetry import acting_groups


def many(tiny, count, level):
    built = [tiny("GPT2LMHeadModel", level, number) for number in range(count)]
    signatures = [signature for signature, _ in built]
    return signatures, [tensors for _, tensors in built], [acting_groups(s, level) for s in signatures]


def readers(models):
    return [model.__getitem__ for model in models]


def aligned(signatures, models, groups, **how):
    return match_universe(signatures, readers(models), groups, roles=list(models[0]), **how)


@pytest.mark.parametrize("count", [3, 4])
def test_every_cycle_composes_to_the_identity(tiny, count):
    signatures, models, groups = many(tiny, count, "orthogonal")
    found = aligned(signatures, models, groups, how=Weights(max_sweeps=2))
    step = [found.alignments[(i + 1) % count].inverse().after(found.alignments[i]) for i in range(count)]
    around = step[0]
    for following in step[1:]:
        around = following.after(around)
    back = apply(signatures[0], around, models[0])
    for role in back:
        assert torch.allclose(back[role], models[0][role], atol=1e-12)


@pytest.mark.parametrize("level", ["permutation", "orthogonal"])
def test_the_scatter_falls_and_no_star_is_better(tiny, level):
    signatures, models, groups = many(tiny, 3, level)
    found = aligned(signatures, models, groups)
    moved = [apply(s, a, m) for s, a, m in zip(signatures, found.alignments, models, strict=True)]
    assert scatter(readers(moved), list(models[0])) == pytest.approx(found.objective[-1], rel=1e-9)
    for before, after in zip(found.objective, found.objective[1:], strict=False):
        assert after <= before * (1 + 1e-9)
    assert len(found.stars) == 3
    assert found.objective[-1] <= min(found.stars.values())


def test_the_scatter_is_the_mean_of_pairwise_distances(tiny):
    _, models, _ = many(tiny, 3, "permutation")
    pairwise = sum(squared(models[i], models[j]) for i in range(3) for j in range(i))
    assert scatter(readers(models), list(models[0])) == pytest.approx(pairwise / 3, rel=1e-9)


def test_the_centre_stays_as_it_is(tiny):
    signatures, models, groups = many(tiny, 3, "orthogonal")
    found = aligned(signatures, models, groups, centre=1, how=Weights(max_sweeps=2))
    assert found.centre == 1
    assert not found.alignments[1].elements


def test_no_model_is_held(tiny):
    """Of the copies that are read, few are alive at a time."""
    signatures, models, groups = many(tiny, 3, "orthogonal")
    alive, most = weakref.WeakSet(), [0]

    def reader(model):
        def read(role):
            copy = model[role].clone()
            alive.add(copy)
            most[0] = max(most[0], sum(tensor.numel() for tensor in alive))
            return copy

        return read

    match_universe(signatures, [reader(m) for m in models], groups, roles=list(models[0]), centre=0,
                   how=Weights(max_sweeps=1), run=Run(workers=1))  # fmt: skip
    largest = max(tensor.numel() for tensor in models[0].values())
    assert most[0] <= 2 * len(models) * largest < sum(tensor.numel() for model in models for tensor in model.values())
