# SPDX-License-Identifier: Apache-2.0
"""What is stored into a part of a tensor keeps its axes there, and only what stands beside it lowers what may act."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onebasin.running import inference
from onebasin.symmetry.inference.atoms import Axis, new
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.tables.signature import MOVES

FREE = MOVES["linear"]
Put = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_empty(asked: Tensor, plain: Tensor, turned: Tensor) -> Tensor:
    """As DeepSeek's keys: one tensor without numbers, of which copies fill both parts."""
    keys = plain.new_empty(*plain.shape[:-1], 7)
    keys[..., :4].copy_(plain)
    keys[..., 4:].copy_(turned.expand(-1, plain.shape[1], -1))
    return asked @ keys.mT


def by_index(asked: Tensor, plain: Tensor, turned: Tensor) -> Tensor:
    keys = torch.zeros(*plain.shape[:-1], 7)
    inner = keys[0:]  # what is put into a view is put into the whole
    inner[..., 4:] = turned
    inner[..., :4] = plain
    return asked @ keys.mT


def in_other_rows(asked: Tensor, plain: Tensor, turned: Tensor) -> Tensor:
    """Constants stand where the other part has no rows."""
    keys = torch.ones(*plain.shape[:-1], 7)
    keys[..., 0, :4] = plain[:, 0]
    keys[..., 4:] = turned
    return asked @ keys.mT


def among_constants(asked: Tensor, plain: Tensor, turned: Tensor) -> Tensor:
    keys = torch.arange(7.0).repeat(*plain.shape[:-1], 1)
    keys[..., 0, :4] = plain[:, 0]
    keys[..., 4:] = turned
    return asked @ keys.mT


@pytest.mark.parametrize(("put", "left"), [(in_empty, [FREE, FREE]), (by_index, [FREE, FREE]),
                                           (in_other_rows, [MOVES["ones"], FREE]),
                                           (among_constants, [MOVES["fixed"], FREE])])  # fmt: skip
def test_parts_are_stored_side_by_side(put: Put, left: list[frozenset[str]]) -> None:
    torch.manual_seed(0)
    asking, plain, turned = nn.Linear(5, 7, bias=False), nn.Linear(5, 4, bias=False), nn.Linear(5, 3, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    for name, layer in (("asking", asking), ("plain", plain), ("turned", turned)):
        setattr(layer.weight, KEY, Label([new(n) for n in layer.weight.shape], name=name))
    x = torch.randn(2, 3, 5)
    with torch.no_grad(), trace:
        put(asking(x), plain(x), turned(x if put is not in_empty else x[:, :1]))
    axis: Axis | None = trace.axes(asking.weight)[0]
    assert axis is not None and [leaf.size for leaf in axis.leaves] == [4, 3]
    assert [leaf.moves for leaf in axis.leaves] == left and not trace.unknown
    for leaf, layer in zip(axis.leaves, (plain, turned), strict=True):
        (written, _) = trace.axes(layer.weight)
        assert written is not None and written.top.atom is leaf.top.atom and written.top.dual != leaf.top.dual


def test_latent_attention_moves_in_its_heads() -> None:
    """MiniCPM3 fills an empty tensor with keys without positions and keys that are turned."""
    found = inference.infer("minicpm3")
    assert not found.unknown
    assert "(head [qk | rope])" in found.text and "(head [qk' | vo])" in found.text


def test_a_mask_as_wide_as_what_it_is_for_takes_nothing_from_it() -> None:
    layer = nn.Linear(3, 4)
    trace = Trace(rules=RULES, silent=SILENT)
    setattr(layer.weight, KEY, Label([new(4), new(3)], name="weight"))
    with torch.no_grad(), trace:
        made = nn.functional.linear(torch.randn(2, 5, 3), layer.weight)
        made * torch.tensor([1.0, 0.0]).view(2, 1, 1).expand_as(made)
    axis = trace.axes(layer.weight)[0]
    assert axis is not None and axis.moves == FREE and not trace.unknown


def test_what_is_stored_in_a_way_that_no_rule_knows_stays() -> None:
    layer = nn.Linear(3, 4, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    setattr(layer.weight, KEY, Label([new(4), new(3)], name="weight"))
    with torch.no_grad(), trace:
        made = layer(torch.randn(5, 3))
        places = made.argmax(0)[:1]
        torch.zeros(4)[places] = made[0, 0]
    axis = trace.axes(layer.weight)[0]
    assert axis is not None and not axis.moves and trace.unknown == {"__setitem__": 2}


def test_a_store_into_nothing_changes_nothing() -> None:
    """SigLIP 2 fills up an image's rows of positions, of which there may be enough."""
    layer = nn.Linear(3, 4, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    setattr(layer.weight, KEY, Label([new(4), new(3)], name="weight"))
    with torch.no_grad(), trace:
        made = layer(torch.randn(5, 3))
        rows = torch.empty(1, 5, 4)
        rows[0, :5] = made
        rows[0, 5:] = made[0]
    (axis, _), (_, _, stored) = trace.axes(layer.weight), trace.axes(rows)
    assert axis is not None and axis.moves == FREE and not trace.unknown
    assert stored is not None and stored.top.atom is axis.top.atom


@pytest.mark.parametrize("there", [True, False])
def test_a_store_where_a_token_stands_binds_without_that_token_too(there: bool) -> None:
    """T5Gemma 2's vector for the end of an image replaces that token's row of the table, in texts that have one."""
    table, end = nn.Embedding(7, 4), nn.Parameter(torch.randn(4))
    trace = Trace(rules=RULES, silent=SILENT)
    setattr(table.weight, KEY, Label([new(7), new(4)], name="table"))
    setattr(end, KEY, Label([new(4)], name="end"))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6 if there else 1]])
    with torch.no_grad(), trace:
        rows = table(ids)
        rows[ids == 6] = end
    (_, row), (one,) = trace.axes(table.weight), trace.axes(end)
    assert row is not None and one is not None and row.top.atom is one.top.atom
    assert row.moves == FREE and not trace.unknown


def test_what_is_stored_step_by_step_moves_as_each_step_does() -> None:
    """As recurrences do, in a tensor whose numbers do not stand in line."""
    layer = nn.Linear(3, 4, bias=False)
    trace = Trace(rules=RULES, silent=SILENT)
    setattr(layer.weight, KEY, Label([new(4), new(3)], name="weight"))
    with torch.no_grad(), trace:
        steps = torch.zeros(2, 4, 5).transpose(1, 2)
        for t in range(5):
            steps[:, t] = layer(torch.randn(2, 3))
        axis = trace.axes(steps)[2]
    assert axis is not None and axis.moves == FREE and axis.top == trace.axes(layer.weight)[0].top
