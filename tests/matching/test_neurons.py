# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
from zoo import CASES, inputs, save

from onebasin.matching.activations import _Meter, match_activations
from onebasin.matching.neurons import BENT, losses
from onebasin.models import Folder
from onebasin.running.loaded import loaded_model
from onebasin.symmetry import acting_groups
from onebasin.symmetry.groups import Permutation, SignedPermutation
from onebasin.symmetry.groups.elements import Monomial


def test_averaged_rectifiers_bend_as_much_as_stated() -> None:
    """Of independent normal inputs: all terms are homogeneous, so that means over the angle are enough."""
    angle = torch.arange(360_000, dtype=torch.float64) * (2 * math.pi / 360_000)
    u, v = angle.cos(), angle.sin()
    x, y, z = u.relu(), v.relu(), ((u + v) / 2).relu()
    bend = z - (x + y) / 2
    assert math.isclose(float(bend.square().mean()), BENT / 4 * float((x - y).square().mean()), rel_tol=1e-8)
    assert abs(float((bend * (x - y)).mean())) < 1e-12


@pytest.mark.parametrize("group", [Permutation(), SignedPermutation()])
@pytest.mark.parametrize("seed", range(5))
def test_the_pairs_that_lose_least_are_found(group: Permutation | SignedPermutation, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(20, 4, generator=generator, dtype=torch.float64) + 1 for _ in range(2))
    c, d = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))

    def lost(index: tuple[int, ...], signs: tuple[int, ...]) -> float:
        sign = torch.tensor(signs, dtype=torch.float64)
        moved, rows = sign * y[:, list(index)], sign[:, None] * d[list(index)]
        apart = (x - moved).square().mean(0)
        return float((apart * ((c - rows).square().sum(1) + BENT * (c + rows).square().sum(1))).sum())

    signs = [(1,) * 4] if group.plain else list(product((1, -1), repeat=4))
    best = min(lost(index, sign) for index in permutations(range(4)) for sign in signs)
    found = group.nearest(losses(x.mT @ y, (x.square().sum(0), y.square().sum(0)), c, d))
    assert isinstance(found, Monomial)
    sign = (1,) * 4 if found.scale is None else tuple(found.scale.int().tolist())
    assert math.isclose(lost(tuple(found.index.tolist()), sign), best, rel_tol=1e-12)


@pytest.mark.parametrize(("kind", "are"), [("permutation", True), ("relu", True), ("linear", False), ("ones", False)])
def test_what_rotates_is_measured_where_it_is_written(kind: str, are: bool, tmp_path: Path) -> None:
    stock = loaded_model(Folder(save(CASES["GPT2LMHeadModel"](), tmp_path / "model")))
    root = next(root for root in stock.signature.members if stock.signature.spaces[root].part == "ffn")
    spaces = stock.signature.spaces
    signature = replace(stock.signature, spaces={**spaces, root: replace(spaces[root], kind=kind)})
    meter = _Meter(signature, stock, stock, inputs(CASES["GPT2LMHeadModel"]()))
    assert (root in meter.neurons) is are
    assert any(meter._roots(site) == [root] for _, sites in meter.outputs.values() for site in sites) is not are


def test_neurons_that_fire_alike_are_told_apart_by_what_they_write(tmp_path: Path) -> None:
    """As their activations cannot tell them apart, half of them are like another one in the anchor, but for noise."""
    torch.manual_seed(0)
    model = CASES["GPT2LMHeadModel"]().double()
    first = model.transformer.h[0].mlp
    half = first.c_fc.weight.shape[1] // 2
    with torch.no_grad():
        first.c_fc.weight[:, half:] = first.c_fc.weight[:, :half]
        first.c_fc.bias[half:] = first.c_fc.bias[:half]
    anchor = loaded_model(Folder(save(model, tmp_path / "anchor")), dtype=torch.float64)
    order = torch.randperm(2 * half)
    with torch.no_grad():
        noise = 0.01 * torch.randn_like(first.c_fc.weight)
        first.c_fc.weight[:] = (first.c_fc.weight + noise)[:, order]
        first.c_fc.bias[:] = first.c_fc.bias[order]
        first.c_proj.weight[:] = first.c_proj.weight[order]
    source = loaded_model(Folder(save(model, tmp_path / "source")), dtype=torch.float64)
    signature = anchor.signature
    root = next(root for root in signature.members if signature.spaces[root].part == "ffn")
    groups = {root: acting_groups(signature, "paper")[root]}
    batches = [inputs(model, seed) for seed in range(4)]
    found = match_activations(signature, anchor, source, batches, groups).elements[root]
    assert isinstance(found, Monomial)
    assert torch.equal(order[found.index], torch.arange(2 * half))
    alone = match_activations(signature, anchor, source, batches, groups, averaged=False).elements[root]
    assert isinstance(alone, Monomial)
    assert not torch.equal(order[alone.index], torch.arange(2 * half))
