# SPDX-License-Identifier: Apache-2.0
"""A new group is one class and one rule: cyclic shifts of neurons, as CONTRIBUTING.md describes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elements import apply, squared
from zoo import CASES, save

from onebasin.matching import match_weights
from onebasin.models import Folder
from onebasin.symmetry import Alignment, Moments
from onebasin.symmetry.exactness import departure
from onebasin.symmetry.groups import Group
from onebasin.symmetry.groups.elements import Element, Monomial
from onebasin.symmetry.groups.group import monomial_departure


class Shifts(Group):
    """Z_n, cyclic shifts of n dimensions: nearest(M) = argmax over k of sum_i M[i, i + k mod n]."""

    name = "shifts"
    moves = frozenset({"shift"})

    def nearest(self, moments: Moments) -> Monomial:
        n = moments.total.shape[-1]
        index = (torch.arange(n) + torch.arange(n).unsqueeze(1)) % n  # (shift, n)
        gains = moments.total[..., torch.arange(n), index].sum(-1)
        return Monomial(index[gains.argmax(-1)])

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        shift = torch.randint(size, (*batch, 1), generator=generator)
        return Monomial((torch.arange(size) + shift) % size)

    def dimension(self, size: int) -> int:
        return 0

    def departure(self, element: Element, generator: torch.Generator) -> float:
        off = monomial_departure(element, permute=True)
        assert isinstance(element, Monomial)
        steps = (element.index - torch.arange(element.index.shape[-1])) % element.index.shape[-1]
        return max(off, float((steps != steps[..., :1]).any()))


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"])
def test_a_planted_element_of_a_new_group_is_recovered(case: str, tmp_path: Path) -> None:
    folder = Folder(save(CASES[case]().double(), tmp_path / case))
    signature, generator = folder.signature, torch.Generator().manual_seed(0)
    neurons = {root: space.size for root, space in signature.spaces.items() if space.name == "ffn"}
    groups: dict[str, Group] = {root: Shifts() for root in neurons}
    planted = Alignment({root: group.random(neurons[root], (), generator) for root, group in groups.items()})
    anchor = {role: folder.read(role, torch.float64) for role in signature.tensors}
    source = apply(signature, planted, anchor)
    found = match_weights(signature, lambda role: (anchor[role], source[role]), groups).alignment
    assert groups and found.elements.keys() == groups.keys()
    for root, group in groups.items():
        assert group.departure(found.elements[root], generator) == 0
    assert departure(signature, found.elements) == 0
    back = apply(signature, found, source)
    assert squared(back, anchor) < 1e-20 * sum(float(t.square().sum()) for t in anchor.values())
