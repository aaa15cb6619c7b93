# SPDX-License-Identifier: Apache-2.0
"""Axes of vectors that stand beside others in one dimension, constants that parameters make, and functions
that are made of others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from onebasin.symmetry.inference.atoms import PERMUTE, Axis, new
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.rules.places import located
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.tables.signature import MOVES

FREE = MOVES["linear"]


def labelled(**held: Tensor) -> Trace:
    """Return a trace in which every axis of some parameters is free."""
    torch.manual_seed(0)
    for name, tensor in held.items():
        setattr(tensor, KEY, Label([new(n) if n > 1 else None for n in tensor.shape], name=name, made=False))
    return Trace(rules=RULES, silent=SILENT)


def first_axis(trace: Trace, tensor: Tensor) -> Axis:
    axis = trace.axes(tensor)[0]
    assert axis is not None
    return axis


@pytest.mark.parametrize("padding", [0, 1])
def test_patches_keep_the_channels_that_they_are_of(padding: int) -> None:
    """As Mistral 3 merges patches of images; zeros beside them move like any other vector."""
    made, read = nn.Conv2d(3, 5, 1, bias=False), nn.Linear(20, 7, bias=False)
    trace = labelled(made=made.weight, read=read.weight)
    with torch.no_grad(), trace:
        patches = functional.unfold(made(torch.randn(2, 3, 4, 4)), kernel_size=2, padding=padding, stride=2)
        read(patches.transpose(1, 2))
    channels = first_axis(trace, made.weight)
    reading = trace.axes(read.weight)[1]
    assert channels.moves == FREE and not trace.unknown
    assert reading is not None and [leaf.size for leaf in reading.leaves] == [5, 4]
    assert next(reading.leaves).top.atom is channels.top.atom
    assert [axis.top.atom for axis in trace.padded] == [channels.top.atom] * bool(padding)


def test_heads_in_one_dimension_with_a_batch_keep_their_parts() -> None:
    """As SAM attends: queries, keys and values in one matrix, and heads flattened with images. They are three parts,
    not the same part three times."""
    fused, out = nn.Linear(6, 3 * 2 * 4, bias=False), nn.Linear(8, 6, bias=False)
    trace = labelled(fused=fused.weight, out=out.weight)
    with torch.no_grad(), trace:
        qkv = fused(torch.randn(5, 7, 6)).reshape(5, 7, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, 10, 7, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        out(mixed.reshape(5, 2, 7, 4).permute(0, 2, 1, 3).reshape(5, 7, 8))
    axis = first_axis(trace, fused.weight)
    assert axis.cat and not trace.unknown
    leaves = list(axis.leaves)
    assert [leaf.size for leaf in leaves] == [2, 4] * 3
    queries, keys, values = leaves[:2], leaves[2:4], leaves[4:]
    assert queries[0].top == keys[0].top == values[0].top and queries[0].moves == MOVES["permutation"]
    assert queries[1].moves == values[1].moves == FREE
    assert queries[1].top == ~keys[1].top and queries[1].top.atom is not values[1].top.atom


def test_places_in_an_image_are_fixed_and_heads_move_with_their_places() -> None:
    """As deformable attention reads images: for every head, vectors at points that another matrix computes."""
    values, points = nn.Linear(6, 2 * 4, bias=False), nn.Linear(6, 2 * 5 * 2, bias=False)
    trace = labelled(values=values.weight, points=points.weight)
    with torch.no_grad(), trace:
        image = values(torch.randn(3, 9, 6)).view(3, 9, 2, 4).permute(0, 2, 3, 1).reshape(6, 4, 3, 3)
        places = points(torch.randn(3, 7, 6)).view(3, 7, 2, 5, 2).transpose(1, 2).reshape(6, 7, 5, 2)
        found = trace.axes(functional.grid_sample(image, places, align_corners=False))
    head, vector = first_axis(trace, values.weight).leaves
    same, point, coordinate = first_axis(trace, points.weight).leaves
    assert head.top.atom is same.top.atom and head.moves == point.moves == MOVES["permutation"]
    assert vector.moves == FREE and not coordinate.moves and not trace.unknown
    assert found[1] is not None and found[1].top.atom is vector.top.atom
    assert found[2] is None and found[3] is not None and found[3].top.atom is point.top.atom


def test_what_a_parameter_turns_by_is_a_constant_where_nothing_moves() -> None:
    """As MLCD turns a class token by angles that it learns, beside those of places."""
    asking, answering = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    own = nn.Parameter(torch.randn(1, 2))
    trace = labelled(asking=asking.weight, answering=answering.weight, own=own)
    with torch.no_grad(), trace:
        angles = torch.cat([own, torch.randn(6, 2)])
        angles = torch.cat([angles, angles], dim=-1)
        q, k = (
            layer(x) * angles.cos() + torch.cat([-layer(x)[..., 2:], layer(x)[..., :2]], dim=-1) * angles.sin()
            for layer, x in ((asking, torch.randn(3, 7, 6)), (answering, torch.randn(3, 7, 6)))
        )
        q @ k.mT
    assert first_axis(trace, asking.weight).moves == MOVES["rotary"] and not trace.unknown
    assert not any(axis.moves for axis in trace.axes(own) if axis is not None)


@pytest.mark.parametrize("repeated", [False, True])
def test_examples_behind_another_dimension_are_told_from_repeated_heads(repeated: bool) -> None:
    """Heads of a batch may stand behind time, in one dimension with the batch; repeated heads have the same numbers."""
    fused, out = nn.Linear(6, 16, bias=False), nn.Linear(4, 3, bias=False)
    trace = labelled(fused=fused.weight, out=out.weight)
    with torch.no_grad(), trace:
        if repeated:
            heads = fused(torch.randn(7, 6))[..., :8].reshape(7, 2, 4).repeat(1, 5, 1)
        else:
            heads = fused(torch.randn(7, 5, 6))[..., :8].reshape(7, 10, 4)
        out(heads)
    leaves = list(first_axis(trace, fused.weight).leaves)
    assert [leaf.size for leaf in leaves] == ([8, 8] if repeated else [2, 4, 8]) and not trace.unknown
    assert all(leaf.moves == FREE for leaf in leaves[repeated:]) and bool(leaves[0].moves) is not repeated


def test_channels_of_a_gated_recurrence_keep_their_factors() -> None:
    """As RecurrentGemma reads them in heads, and begins with zeros: h = a h + x, where the gate a reads x."""
    made, kernel, gate, out = (nn.Parameter(torch.randn(*shape)) for shape in ((8, 6), (8, 1, 3), (2, 4, 4), (6, 8)))
    trace = labelled(made=made, kernel=kernel, gate=gate, out=out)
    with torch.no_grad(), trace:
        x = functional.conv1d(functional.linear(torch.randn(5, 7, 6), made).transpose(1, 2), kernel, groups=8)
        x = x.transpose(1, 2)  # (5, 5, 8)
        heads = x.reshape(25, 2, 4).permute(1, 0, 2)
        a = torch.bmm(heads, gate).transpose(0, 1).reshape(5, 5, 8).sigmoid()
        h = torch.zeros(5, 8)
        for t in range(5):
            h = a[:, t] * h + x[:, t]
        functional.linear(h, out)
    ones, own = first_axis(trace, made).leaves, first_axis(trace, kernel).leaves
    *heads_made, first = ones
    *heads_kept, second = own
    assert [leaf.size for leaf in heads_made] == [2, 4]
    assert {leaf.moves for leaf in heads_made} == {MOVES["permutation"]}
    assert [leaf.top.atom for leaf in heads_made] == [leaf.top.atom for leaf in heads_kept]
    for factor in (first, second):
        assert factor.size == 1 and factor.moves == MOVES["factor"]
    read = [list(axis.leaves) for axis in trace.axes(gate) if axis is not None][1]
    assert [leaf.top for leaf in read[1:]] == [~first.top, ~second.top]


@pytest.mark.parametrize("begins", [False, True])
def test_zeros_that_may_be_others_for_other_inputs_bind(begins: bool) -> None:
    """A mask that is zero everywhere in a twin is not in a model, unlike the state that a recurrence begins with."""
    one, other, out = (nn.Linear(*sizes, bias=False) for sizes in ((6, 8), (6, 8), (8, 3)))
    trace = labelled(one=one.weight, other=other.weight, out=out.weight)
    with torch.no_grad(), trace:
        x = torch.randn(5, 6)
        zeros = torch.zeros(5, 8)
        if not begins:
            zeros[x.sum(-1) > 100] = 1
        out(one(x) + zeros * other(x))
    assert (first_axis(trace, one.weight).top == first_axis(trace, other.weight).top) is not begins


def test_a_factor_that_a_convolution_takes_back_is_not_seen_behind_it() -> None:
    """As Mamba's channels, each convolved by itself under SiLU: the matrix takes a factor, and the kernel its
    inverse. What is multiplied by a vector and added to that is added to has no factor left."""
    made, kernel, bias, skip, out = (
        nn.Parameter(torch.randn(*shape)) for shape in ((8, 6), (8, 1, 3), (8,), (8,), (6, 8))
    )
    trace = labelled(made=made, kernel=kernel, bias=bias, skip=skip, out=out)
    with torch.no_grad(), trace:
        x = functional.linear(torch.randn(5, 7, 6), made).transpose(1, 2)
        x = functional.silu(functional.conv1d(x, kernel, bias, groups=8)).transpose(1, 2)
        functional.linear(x + skip * x, out)
    (places, factor), (same, inverse) = (first_axis(trace, one).leaves for one in (made, kernel))
    assert places.top == same.top and places.moves == MOVES["permutation"] and not trace.unknown
    assert factor.top == ~inverse.top and factor.moves == MOVES["factor"]
    (reading,) = trace.axes(out)[1].leaves  # type: ignore[union-attr]
    (added,) = first_axis(trace, bias).leaves
    assert reading.top.atom is added.top.atom is places.top.atom
    assert [leaf.moves for leaf in first_axis(trace, skip).leaves] == [MOVES["permutation"], frozenset()]


def test_what_no_token_reaches_is_not_seen() -> None:
    """As in layers with matrices of their own for tokens of sounds: nothing is learned of them from a text."""
    words, sounds = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    trace = labelled(words=words.weight, sounds=sounds.weight)
    with torch.no_grad(), trace:
        tokens = torch.randn(5, 6)
        for each, chosen in ((words, torch.ones(5).bool()), (sounds, torch.zeros(5).bool())):
            each(tokens[chosen])
    assert list(trace.seen) == ["words"]


VIEWS = {
    "turned": lambda where: where.permute(2, 0, 1),
    "flat": lambda where: where.reshape(-1),
    "turned and flat": lambda where: where.permute(0, 2, 1).reshape(4, -1),
    "every other": lambda where: where[1::2, :, 1:],
    "backwards": lambda where: where.flip(2),
    "one": lambda where: where[2, 1],
    "windows": lambda where: where.flatten().unfold(0, 5, 3),
    "repeated": lambda where: where[:, None].expand(4, 2, 6, 10)[..., None, :],
    "steps that carry": lambda where: where.flatten()[3::7],
    "split": lambda where: where.view(4, 3, 2, 5, 2).transpose(1, 3),
    "no view": lambda where: where.flatten()[torch.randperm(240, generator=torch.Generator().manual_seed(0))].view(
        8, 30
    ),
    "nothing": lambda where: where[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_coordinates_of_numbers_are_their_remainders(name: str) -> None:
    """In steps or one by one, looked up or not."""
    numbers = torch.arange(240).view(4, 6, 10)
    view = VIEWS[name](numbers)
    for shape in ((4, 6, 10), (240,), (2, 1, 120), (3, 5, 4, 4)):
        for where in (view, view.clone(), view):
            rest, (places, depends) = where, located(where, torch.Size(shape), numbers)
            for size, found, along in zip(*map(reversed, (shape, places, depends)), strict=True):
                assert torch.equal(found, rest % size)
                assert along == {j for j, n in enumerate(where.shape) if n and (found != found.narrow(j, 0, 1)).any()}
                rest = rest // size


def test_fused_attention_has_the_axes_of_its_parts() -> None:
    """Heads permute, and any invertible map acts inside them."""
    module = nn.MultiheadAttention(6, 2)
    trace = labelled(**dict(module.named_parameters()))
    with torch.no_grad(), trace:
        x = torch.randn(5, 3, 6)
        module(x, x, x)
    axis = trace.axes(module.in_proj_weight)[0]
    assert axis is not None and not trace.unknown
    assert [("shear" in leaf.moves, leaf.size) for leaf in axis.leaves] == [(False, 2), (True, 3)] * 3


@pytest.mark.parametrize("padded", [False, True])
def test_fused_attention_of_three_matrices_adds_what_it_is_given_for_heads(padded: bool) -> None:
    """As WavLM's does: the heads of a bias of positions permute with those of queries and keys, others stay."""
    held = {f"{name}_proj_weight": torch.randn(6, 6) for name in "qkv"}
    held |= {"bias": torch.randn(2, 5, 5), "out": torch.randn(6, 6)}
    trace = labelled(**held)
    x, padding = torch.randn(5, 3, 6), torch.arange(5) > torch.tensor([[4], [3], [2]])

    def run() -> torch.Tensor:
        mask = held["bias"].expand(3, 2, 5, 5).reshape(6, 5, 5)
        return functional.multi_head_attention_forward(
            x, x, x, 6, 2, None, None, None, None, False, 0.0, held["out"], None, attn_mask=mask,
            key_padding_mask=padding if padded else None, use_separate_proj_weight=True,
            **{name: held[name] for name in held if "proj" in name})[0]  # fmt: skip

    expected = run()
    with torch.no_grad(), trace:
        assert torch.allclose(run(), expected, atol=1e-6)
    assert not trace.unknown
    heads = [next(trace.axes(held[f"{name}_proj_weight"])[0].leaves).top for name in "qkv"]
    bias = trace.axes(held["bias"])
    assert {head.atom for head in heads} == {bias[0].top.atom} and bias[0].moves == PERMUTE
    assert [leaf.size for leaf in trace.axes(held["out"])[1].leaves] == [2, 3]


def test_the_rows_of_a_normed_weight_permute_with_their_sizes_and_what_they_read_turns() -> None:
    """W = g v / |v|, where |v| is the length of a slice over all axes but one."""
    module = parametrizations.weight_norm(nn.Linear(4, 3, bias=False))
    held = {**dict(module.named_parameters()), "before": torch.randn(4, 4)}
    trace = labelled(**held)
    with torch.no_grad(), trace:
        module(functional.linear(torch.randn(2, 4), held["before"]))
    assert not trace.unknown
    size, direction, before = (trace.axes(tensor) for tensor in held.values())
    (row,) = direction[0].leaves
    assert row.moves == PERMUTE and row.top in [leaf.top for leaf in size[0].leaves]
    assert direction[1].top.atom is before[0].top.atom and direction[1].moves == MOVES["orthogonal"]
