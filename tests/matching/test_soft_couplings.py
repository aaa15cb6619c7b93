# SPDX-License-Identifier: Apache-2.0
"""Semi-permutations after matching: shares of one neuron or head, split unevenly, come together again."""

from __future__ import annotations

import pytest
import torch
from elements import apply, random_alignment, squared

from onebasin.matching import match_weights, soft_couplings
from onebasin.symmetry import Alignment, acting_groups
from onebasin.symmetry.coupling import Blend, Softened


def split(signature, tensors, roots, share):
    """The first two neurons (or heads) become one that is split between them: same inputs, outputs in shares."""
    made = {role: tensor.clone() for role, tensor in tensors.items()}
    for root in roots:
        for role in signature.touching[root]:
            for view, leaf, _ in signature.views(role, made[role], root):
                reads_out = leaf.dual and role.endswith("c_proj.weight")
                whole = view[0].clone()
                view[0], view[1] = (share * whole, (1 - share) * whole) if reads_out else (whole, whole)
    return made


def soft(signature, anchor, source, groups, temperature):
    """The distance after matching, and after mixing at this temperature as well."""
    found = match_weights(signature, lambda role: (anchor[role], source[role]), groups, start=Alignment()).alignment
    moved = apply(signature, found, source)
    couplings = soft_couplings(signature, lambda role: (anchor[role], moved[role]), groups, temperature)
    return squared(anchor, moved), squared(anchor, apply(signature, Softened(Alignment(), couplings), moved)), couplings


@pytest.mark.parametrize("part", ["ffn", "attention"])
def test_a_split_neuron_or_head_is_put_together(tiny, part):
    """Even shares in the anchor, uneven ones in the source, in another order and with other bases inside the heads. No
    permutation brings them together, the coupling does."""
    signature, tensors = tiny("GPT2LMHeadModel-relu", "full")
    roots = ["h.0.ffn"] if part == "ffn" else ["h.0.qk", "h.0.vo"]
    groups = acting_groups(signature, "orthogonal", parts=[part], layers=[0])
    anchor, source = (split(signature, tensors, roots, share) for share in (0.5, 0.2))
    source = apply(signature, random_alignment(signature, groups), source)
    hard, mixed, couplings = soft(signature, anchor, source, groups, 0.005)
    assert hard > 1e-3
    assert mixed < 1e-6 * hard
    assert set(couplings) == set(roots)


def strangers(tiny, level):
    signature, anchor = tiny("GPT2LMHeadModel", level)
    _, source = tiny("GPT2LMHeadModel", level, number=1)
    return signature, anchor, source, acting_groups(signature, level)


@pytest.mark.parametrize("level", ["permutation", "orthogonal"])
def test_at_temperature_zero_matching_stays(tiny, level):
    hard, mixed, couplings = soft(*strangers(tiny, level), 1e-5)
    assert mixed == pytest.approx(hard, rel=1e-5)  # bases inside heads had settled to 1e-6 a sweep
    assert any(isinstance(coupling, Blend) for coupling in couplings.values())


def test_the_shares_of_heads_sum_to_one(tiny):
    """Every block of a blend is a rotation times its share."""
    _, _, couplings = soft(*strangers(tiny, "orthogonal"), 1.0)
    for coupling in couplings.values():
        if isinstance(coupling, Blend):
            shares = torch.linalg.matrix_norm(coupling.matrix) / coupling.matrix.shape[-1] ** 0.5
            assert (shares > 0.01).all()
            assert torch.allclose(shares.sum(0), torch.ones(len(shares)).double(), atol=1e-6)
            assert torch.allclose(shares.sum(1), torch.ones(len(shares)).double(), atol=1e-6)


def test_heads_with_tensors_of_their_own_keep_their_order(tiny):
    signature, tensors = tiny("T5ForConditionalGeneration", "full")
    groups = acting_groups(signature, "orthogonal", parts=["attention"])
    couplings = soft_couplings(signature, lambda role: (tensors[role], tensors[role]), groups, 0.1)
    assert not any(key.startswith(("encoder.block.0.qk", "decoder.block.0.qk")) for key in couplings)
