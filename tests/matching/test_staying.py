# SPDX-License-Identifier: Apache-2.0
"""The proof that no permutation is better than none: never given where there is one, found where models are near."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from elements import apply, random_alignment

from onebasin.matching import identity_proof as staying
from onebasin.matching import match_weights
from onebasin.matching.identity_proof import stays
from onebasin.symmetry import acting_groups


def ffn_of(signature):
    return next(root for root, group in acting_groups(signature, "paper").items() if group.name == "permutation")


def near(tensors, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    return {role: t + noise * torch.randn(t.shape, generator=generator).to(t) for role, t in tensors.items()}


@pytest.mark.parametrize("columns", [1, 3, 128])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0, 3.0])
def test_what_is_proved_is_true(columns, noise):
    """Against brute force over all permutations of five rows."""
    proved = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        anchor = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        source = anchor + noise * torch.randn(5, 6, generator=generator, dtype=torch.float64)
        some = (anchor[:, :columns], source[:, :columns])
        if staying._separate(*some, (anchor - source).square().sum(1)):
            proved += 1
            best = min(permutations(range(5)), key=lambda p: float((anchor - source[list(p)]).square().sum()))
            assert best == tuple(range(5))
    assert proved == 40 if noise == 0 else proved < 40 or noise < 1


@pytest.mark.parametrize("case", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_near_models_stay_and_others_are_not_said_to(tiny, case):
    signature, anchor = tiny(case)
    root = ffn_of(signature)

    def asked(source):
        pairs = [(role, anchor[role], source[role], 1.0) for role in signature.touching[root]]
        return stays(signature, root, lambda: pairs)

    assert asked(near(anchor, 1e-3, 0))
    groups = acting_groups(signature, "paper")
    assert not asked(apply(signature, random_alignment(signature, groups), anchor))
    assert not asked(near(anchor, 30.0, 1))


def test_matching_finds_the_same_with_the_proof_and_without(tiny, monkeypatch):
    signature, anchor = tiny("BertForSequenceClassification")
    source, groups = near(anchor, 1e-3, 0), acting_groups(signature, "paper")
    found = {}
    for least in (1, 10**9):
        monkeypatch.setattr("onebasin.matching.weights.FROM", least)
        found[least] = match_weights(signature, lambda role: (anchor[role], source[role]), groups)
    one, other = found.values()
    assert one.alignment.elements.keys() == other.alignment.elements.keys()
    for root, element in one.alignment.elements.items():
        same = other.alignment.elements[root]
        assert (
            torch.equal(element.index, same.index)
            if hasattr(element, "index")
            else (torch.equal(element.matrix, same.matrix))
        )
    assert one.objective[-1] == pytest.approx(other.objective[-1], rel=1e-12)
