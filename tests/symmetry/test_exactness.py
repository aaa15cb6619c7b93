# SPDX-License-Identifier: Apache-2.0
"""Random elements pass the check of maps; maps that leave their group by little or by kind do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zoo import CASES, save

from onebasin.models import Folder
from onebasin.symmetry import Alignment, Signature, acting_groups
from onebasin.symmetry.exactness import departure
from onebasin.symmetry.groups.elements import Linear, Monomial

NAMES = [
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "ViTForImageClassification",
    "T5ForConditionalGeneration",
]


def random_element(signature: Signature, level: str) -> Alignment:
    generator = torch.Generator().manual_seed(1)
    groups = acting_groups(signature, level, rescale="joint")
    elements = {
        root: group.random(space.size, tuple(signature.sizes[outer] for outer in space.batch), generator)
        for root, group in groups.items()
        for space in [signature.spaces[root]]
    }
    return Alignment(elements, {root: signature.spaces[root].batch for root in groups})


@pytest.fixture
def signature(tmp_path: Path):
    def of(name: str) -> Signature:
        return Folder(save(CASES[name](), tmp_path / name)).signature

    return of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal", "full", "invertible"])
def test_elements_of_every_group_pass(signature, name: str, level: str) -> None:
    made = signature(name)
    assert departure(made, random_element(made, level).elements) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_a_small_error_in_any_matrix_is_seen(signature, name: str) -> None:
    made = signature(name)
    elements = random_element(made, "full").elements
    for root, element in elements.items():
        if isinstance(element, Linear):
            wrong = element.matrix.clone()
            wrong[..., 0, 0] += 1e-3
            found = departure(made, {root: replace(element, matrix=wrong)})
            assert 1e-5 < found < 1e-1, root
        elif element.scale is None:
            twice = element.index.clone()
            twice[..., 0] = twice[..., 1]
            with pytest.raises(ValueError, match="not a permutation"):
                departure(made, {root: Monomial(twice)})


def test_maps_that_may_not_act(signature) -> None:
    """In a Llama heads rotate pair by pair, neurons change places, and scales stand where a product undoes them."""
    made = signature("LlamaForCausalLM")
    spaces = {key: made.spaces[key] for key in made.root.values()}
    ffn = next(key for key, space in spaces.items() if space.name == "ffn")
    qk = next(key for key, space in spaces.items() if space.name == "qk")
    n, batch = spaces[qk].size, tuple(made.sizes[outer] for outer in spaces[qk].batch)
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)).Q
    assert departure(made, {qk: Linear(rotation)}) > 0.1
    with pytest.raises(ValueError, match="a matrix may not act"):
        departure(made, {ffn: Linear(torch.eye(spaces[ffn].size, dtype=torch.float64))})
    order = torch.arange(spaces[ffn].size)
    assert departure(made, {ffn: Monomial(order, torch.full(order.shape, 2.0))}) == 1.0
    with pytest.raises(ValueError, match="zero or not finite"):
        departure(made, {ffn: Monomial(order, torch.zeros(order.shape))})
    with pytest.raises(ValueError, match="negative"):
        departure(made, {ffn: Monomial(order, -torch.ones(order.shape))})
    with pytest.raises(ValueError, match="may change places"):
        departure(made, {qk: Monomial(torch.arange(n).flip(0).expand(*batch, n))})
    with pytest.raises(ValueError, match="not finite"):
        departure(made, {qk: Linear(rotation * torch.nan)})


def test_maps_of_other_shapes_are_of_other_models(signature) -> None:
    made = signature("LlamaForCausalLM")
    elements = random_element(made, "full").elements
    for root, element in elements.items():
        numbers = element.index if isinstance(element, Monomial) else element.matrix
        for other in (numbers[None], numbers[..., :-1]):
            wrong = Monomial(other) if isinstance(element, Monomial) else Linear(other)
            with pytest.raises(ValueError, match=f"belongs to other models: its map of '{root}' has the shape"):
                departure(made, {root: wrong})
    with pytest.raises(ValueError, match="no space 'elsewhere'"):
        departure(made, {"elsewhere": element})
