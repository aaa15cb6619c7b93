# SPDX-License-Identifier: Apache-2.0
"""The proof that no permutation is better: never given where one is, found where models are near or copies."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from elements import apply, random_alignment

from onebasin.matching import match_weights, order_proof
from onebasin.matching.order_proof import proved
from onebasin.symmetry import acting_groups
from onebasin.symmetry.gauge.canonical import canonical


def ffn_of(signature):
    return next(root for root, group in acting_groups(signature, "paper").items() if group.name == "permutation")


def near(tensors, noise, seed):
    """The same with noise in matrices; norms that are folded away stay so."""
    generator = torch.Generator().manual_seed(seed)
    return {
        role: t + (t.dim() > 1) * noise * torch.randn(t.shape, generator=generator).to(t) for role, t in tensors.items()
    }


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
        if order_proof._separate(*some, (anchor - source).square().sum(1)):
            proved += 1
            best = min(permutations(range(5)), key=lambda p: float((anchor - source[list(p)]).square().sum()))
            assert best == tuple(range(5))
    assert proved == 40 if noise == 0 else proved < 40 or noise < 1


@pytest.mark.parametrize("case", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_orders_of_near_models_and_copies_are_proved_and_no_others(tiny, case):
    signature, anchor = tiny(case)
    root, groups = ffn_of(signature), acting_groups(signature, "paper")

    def asked(source):
        pairs = [(role, anchor[role], source[role], 1.0) for role in signature.touching[root]]
        return proved(signature, root, {}, lambda: pairs)

    elements, gained = asked(near(anchor, 1e-3, 0))
    assert elements[root].is_identity() and gained == 0
    planted = random_alignment(signature, {root: groups[root]})
    elements, gained = asked(apply(signature, planted, near(anchor, 1e-3, 0)))
    assert elements[root].index.equal(planted.inverse().elements[root].index) and gained > 0
    assert asked(near(anchor, 30.0, 1)) is None


@pytest.mark.parametrize("case", ["BertForSequenceClassification", "LlamaForCausalLM"])
@pytest.mark.parametrize("level", ["paper", "full"])
def test_matching_finds_the_same_with_the_proof_and_without(tiny, monkeypatch, level, case):
    """Of a scrambled model with noise; gated neurons have factors, too."""
    form = canonical(*tiny(case))
    signature, anchor = form.signature, form.tensors
    groups = acting_groups(signature, level, rescale="joint")
    planted = random_alignment(signature, {r: g for r, g in groups.items() if signature.spaces[r].layer is not None})
    source = apply(signature, planted, near(anchor, 1e-3, 0))
    found, seen = {}, []
    for least in (1, 10**9):
        monkeypatch.setattr("onebasin.matching.order_proof.FROM", least)
        monkeypatch.setattr(
            "onebasin.matching.coordinate_descent.proved", lambda *given: seen.append(proved(*given)) or seen[-1]
        )
        found[least] = match_weights(signature, lambda role: (anchor[role], source[role]), groups)
    assert any(seen)
    one, other = found.values()
    assert one.alignment.elements.keys() == other.alignment.elements.keys()
    for root, element in one.alignment.elements.items():
        same = other.alignment.elements[root]
        if hasattr(element, "index"):
            assert torch.equal(element.index, same.index)
        for name in ("scale", "matrix"):
            if getattr(element, name, None) is not None:
                assert torch.allclose(getattr(element, name), getattr(same, name), atol=1e-9)
    assert one.objective[-1] == pytest.approx(other.objective[-1], rel=1e-6, abs=1e-9 * one.before)
