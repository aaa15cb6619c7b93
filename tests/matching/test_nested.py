# SPDX-License-Identifier: Apache-2.0
"""Experts, their neurons and a sign for each neuron: the joint optimum beats every other element, and is their best."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch

from onebasin.matching.nested import chains, nearest_nested
from onebasin.symmetry import Alignment, read_table, resolve
from onebasin.symmetry.groups import Factors, Permutation, Signs
from onebasin.symmetry.groups.elements import Monomial

TABLE = """
family experts
size   expert = experts
spaces
    vocab   fixed
    expert  permutation ffn
    ffn     permutation ffn  per expert
    up_scale    factor      ffn  per expert, ffn
tensors
    router  expert vocab'
    gate    (expert ffn) vocab'
    up      (expert ffn up_scale) vocab'
    down    vocab (expert ffn up_scale')
"""


def pair(experts: int, neurons: int):
    shapes = {"router": (experts, 4), "gate": (experts * neurons, 4), "up": (experts * neurons, 4),
              "down": (4, experts * neurons)}  # fmt: skip
    signature = resolve(read_table(TABLE), shapes, {"experts": experts})
    generator = torch.Generator().manual_seed(3)
    draw = [{k: torch.randn(v, generator=generator, dtype=torch.float64) for k, v in shapes.items()} for _ in range(2)]
    return signature, *draw


def distance(signature, anchor, source, elements) -> float:
    batch = {root: signature.spaces[root].batch for root in elements}
    alignment = Alignment(elements, batch)
    return sum(float((anchor[role] - alignment.apply(signature, role, source[role])).square().sum()) for role in anchor)


def every(experts: int, neurons: int, signed: bool):
    """All elements of the group."""
    orders = list(permutations(range(neurons)))
    signs = list(product((1.0, -1.0), repeat=experts * neurons)) if signed else [(1.0,) * (experts * neurons)]
    for outer in permutations(range(experts)):
        for inner in product(orders, repeat=experts):
            for sign in signs:
                scale = torch.tensor(sign, dtype=torch.float64).view(experts, neurons, 1)
                yield {"expert": Monomial(torch.tensor(outer)), "ffn": Monomial(torch.tensor(inner)),
                       "up_scale": Monomial(torch.zeros(experts, neurons, 1, dtype=torch.long), scale)}  # fmt: skip


@pytest.mark.parametrize(("experts", "neurons", "signed"), [(3, 2, False), (2, 2, True)])
def test_it_is_the_best_of_all_elements(experts: int, neurons: int, signed: bool) -> None:
    signature, anchor, source = pair(experts, neurons)
    groups = {"expert": Permutation(), "ffn": Permutation(), **({"up_scale": Signs()} if signed else {})}
    ((_, chain),) = chains(signature, groups).items()
    found, gain = nearest_nested(signature, chain, groups, [(r, anchor[r], source[r], 1.0) for r in anchor])
    best = min(distance(signature, anchor, source, element) for element in every(experts, neurons, signed))
    reached = distance(signature, anchor, source, found)
    assert reached == pytest.approx(best, rel=1e-12)
    assert gain == pytest.approx(distance(signature, anchor, source, {}) - reached, rel=1e-12)


def test_factors_gain_on_signs_and_nothing_near_is_better() -> None:
    signature, anchor, source = pair(3, 4)
    pairs = [(role, anchor[role], source[role], 1.0) for role in anchor]
    groups = {"expert": Permutation(), "ffn": Permutation(), "up_scale": Factors()}
    signs = {**groups, "up_scale": Signs()}
    chain = chains(signature, groups)["expert"]
    found, gain = nearest_nested(signature, chain, groups, pairs)
    reached = distance(signature, anchor, source, found)
    assert gain == pytest.approx(distance(signature, anchor, source, {}) - reached, rel=1e-12)
    assert reached < distance(signature, anchor, source, nearest_nested(signature, chain, signs, pairs)[0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        index = torch.stack([torch.randperm(4, generator=generator) for _ in range(3)])
        other = {"expert": Monomial(torch.randperm(3, generator=generator)), "ffn": Monomial(index),
                 "up_scale": Factors().random(1, (3, 4), generator)}  # fmt: skip
        assert reached < distance(signature, anchor, source, other)
