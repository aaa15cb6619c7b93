# SPDX-License-Identifier: Apache-2.0
"""A new group is one class and one rule: cyclic shifts of neurons, as CONTRIBUTING.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder, scrambled

import onebasin
from onebasin.symmetry import Moments, levels
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

    def departure(self, element: Element, generator: torch.Generator) -> float:
        off = monomial_departure(element, permute=True)
        assert isinstance(element, Monomial)
        steps = (element.index - torch.arange(element.index.shape[-1])) % element.index.shape[-1]
        return max(off, float((steps != steps[..., :1]).any()))


def shifting(kind: str, part: str, *how: Any) -> Group | None:
    """The rules of levels.py, and one more: neurons shift."""
    return Shifts() if part == "ffn" and kind != "factor" else RULE(kind, part, *how)


RULE = levels._group


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"])
def test_planted_elements_of_a_new_group_are_recovered(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_group", shifting)
    anchor = folder(tmp_path / "anchor", case, dtype=torch.float64)
    source = scrambled(anchor, tmp_path / "source")
    found = onebasin.match(source, anchor, precision="float64")
    assert found.distance_after < 1e-9 < 1 < found.distance_before
    shifts = {root: one for root, one in found.alignment.alignment.elements.items() if root.endswith("ffn")}
    assert shifts and not any(one.is_identity() for one in shifts.values())
    assert all(Shifts().departure(one, torch.Generator()) == 0 for one in shifts.values())
