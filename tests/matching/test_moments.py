# SPDX-License-Identifier: Apache-2.0
"""Cross-moments of isometries, which keep one sum: the same optimum, and the same gain, as with both sides apart."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from onebasin.engine import in_order
from onebasin.matching.moments import carried, cross_moments
from onebasin.symmetry import Alignment, acting_groups
from onebasin.symmetry.groups.elements import Linear
from onebasin.symmetry.groups.orthogonal import random_orthogonal

CASES = ["BertForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM"]


@pytest.fixture(params=CASES)
def spaces(request, tiny):
    """(root, group, pairs) of every space of a model in which an isometry acts."""
    signature, anchor = tiny(request.param)
    generator = torch.Generator().manual_seed(0)
    source = {role: torch.randn(t.shape, generator=generator, dtype=t.dtype) for role, t in anchor.items()}
    groups = {**acting_groups(signature, "permutation"), **acting_groups(signature, "full")}
    found = []
    for root, group in groups.items():
        roles = [role for role in signature.touching[root] if signature.tensors[role].alias is None]
        pairs = [(role, anchor[role], source[role], 0.5 + 0.1 * i) for i, role in enumerate(roles)]
        if group.isometry and any(not signature.tensors[role].diagonal for role in roles):
            found.append((root, group, pairs))
    assert any(len({leaf.dual for role, *_ in pairs for leaf in signature.leaves(signature.tensors[role])}) == 2
               for _, _, pairs in found)  # fmt: skip
    return signature, found


def test_one_sum_is_the_sum_of_both_sides(spaces):
    signature, found = spaces
    for root, group, pairs in found:
        given = [(anchor.clone(), source.clone()) for _, anchor, source, _ in pairs]
        both, one = (cross_moments(signature, root, pairs, isometry=isometry) for isometry in (False, True))
        assert one.one_sided and torch.allclose(one.total, both.total, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, x) and torch.equal(s, y) for (_, a, s, _), (x, y) in zip(pairs, given, strict=True))
        element = group.random(signature.spaces[root].size, one.primal.shape[:-2], torch.Generator().manual_seed(1))
        gains = [moments.stay() - moments.value(element) for moments in (both, one)]
        assert torch.allclose(*gains, rtol=1e-9, atol=1e-9)


def test_products_formed_ahead_add_up_to_the_same(spaces):
    signature, found = spaces
    for root, _, pairs in found:
        at_once = cross_moments(signature, root, pairs, isometry=True)
        ahead = cross_moments(signature, root, pairs, isometry=True, run=partial(in_order, workers=2))
        assert torch.allclose(at_once.total, ahead.total, rtol=1e-12, atol=1e-12)


def test_what_acted_on_the_source_acts_on_the_sum(spaces):
    signature, found = spaces
    for root, group, pairs in found:
        moments = [cross_moments(signature, root, pairs, isometry=isometry) for isometry in (False, True)]
        size, batch = signature.spaces[root].size, moments[0].primal.shape[:-2]
        element = group.random(size, batch, torch.Generator().manual_seed(2))
        both, one = (carried(each, element) for each in moments)
        assert torch.allclose(one.total, both.total, rtol=1e-9, atol=1e-9)
        assert one.map(torch.Tensor.clone).total.equal(one.total)
        assert (one + both).total.allclose(2 * both.total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["BertForSequenceClassification", "OPTForCausalLM"])
def test_float32_tells_the_distance_that_an_ill_conditioned_map_leaves(case, tiny):
    """Its condition squared multiplies the rounding of the source's own moments."""
    signature, anchor = tiny(case)
    generator = torch.Generator().manual_seed(0)
    for root, group in acting_groups(signature, "invertible").items():
        if not group.uses_gram:
            continue
        roles = [role for role in signature.touching[root] if signature.tensors[role].alias is None]
        size = signature.spaces[root].size
        pairs = [
            (role, anchor[role].float(), torch.randn(anchor[role].shape, generator=generator), 1.0) for role in roles
        ]
        moments = cross_moments(signature, root, pairs, gram=True)
        batch = moments.primal.shape[:-2]
        turns = [random_orthogonal(size, batch, generator) for _ in range(2)]
        spectrum = torch.logspace(-2.5, 1.5, size, dtype=torch.float64)
        map_ = Linear((turns[0] * spectrum) @ turns[1], (turns[0] / spectrum) @ turns[1])
        alignment = Alignment({root: map_}, {root: signature.spaces[root].batch})
        moved = [squared(alignment.apply(signature, role, s.double()) - a) for role, a, s, _ in pairs]
        constant = [squared(a) for _, a, _, _ in pairs]
        told = float(moments.value(map_).sum()) + sum(constant)
        assert told == pytest.approx(sum(moved), rel=1e-8)


def squared(tensor):
    return float(tensor.double().square().sum())
