# SPDX-License-Identifier: Apache-2.0
"""Rotations of pairs that are brought into another order first: DeepSeek's queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onebasin.running import inference
from onebasin.symmetry.inference.atoms import Axis, evens_first, new, restrict
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.inference.unification import split, unify
from onebasin.symmetry.tables.signature import MOVES

TURNED = MOVES["interleaved"], MOVES["interleaved"]
STILL = MOVES["fixed"], MOVES["fixed"]


def turned(x: Tensor, ordered: bool) -> Tensor:
    """Every place turns its pairs, (2 i, 2 i + 1) if they are ordered first."""
    half = x.shape[-1] // 2
    if ordered:
        x = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    angles = torch.arange(x.shape[-2]).view(-1, 1) * torch.linspace(0.1, 1, half).repeat(2)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def moves(asked: bool, found: bool, beside: bool = False) -> tuple[frozenset[str], ...]:
    """What may act on the queries and the keys of a module that orders the pairs of some of them."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 6, bias=False), nn.Linear(5, 6, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    for name, layer in zip("qk", layers, strict=True):
        setattr(layer.weight, KEY, Label([new(n) for n in layer.weight.shape], name=name))
    x = torch.randn(2, 4, 5)
    with torch.no_grad(), trace:
        q, k = turned(layers[0](x), asked), turned(layers[1](x), found)
        if beside:  # settled before they meet
            q, k = (torch.cat([torch.ones(2, 4, 1), each], -1) for each in (q, k))
        assert torch.isfinite(q @ k.mT).all()
    axes = [trace.axes(layer.weight)[0] for layer in layers]
    assert all(axis is not None and axis.top == axis.home for axis in axes)
    return tuple(axis.moves for axis in axes if axis is not None)


@pytest.mark.parametrize("beside", [False, True])
def test_pairs_are_those_of_the_parameters(beside: bool) -> None:
    assert moves(True, True, beside) == TURNED
    assert moves(False, False, beside) == (MOVES["rotary"], MOVES["rotary"])


@pytest.mark.parametrize("beside", [False, True])
def test_two_orders_that_meet_stay(beside: bool) -> None:
    assert moves(True, False, beside) == STILL


def test_an_axis_in_another_order_knows_what_the_axis_does() -> None:
    axis = new(6)
    other = evens_first(axis)
    restrict(axis, MOVES["interleaved"], "a test")
    assert other.moves == MOVES["rotary"]
    restrict(other, MOVES["pair signs"], "a test")
    assert axis.moves == MOVES["next signs"]
    third = new(6)
    unify(axis, third, "a test")
    assert third.moves == MOVES["next signs"] and other.home == third.top


def test_pairs_that_are_taken_apart_stay() -> None:
    axis = new(6)
    other: Axis = ~evens_first(axis)
    assert other.home == ~axis
    assert not any(part.moves for part in split(other, [2, 3])) and not axis.moves


def test_rotary_parts_of_latent_attention_turn() -> None:
    text = inference.infer("deepseek_v3").text
    assert "    rope interleaved attention per layer\n" in text
    assert "(head [qk | rope])" in text and "[rank2 | rope']" in text
