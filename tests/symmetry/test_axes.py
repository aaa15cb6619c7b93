# SPDX-License-Identifier: Apache-2.0
"""The axis notation: what is written is what is read, and views cut a tensor into exactly its entries."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebasin.symmetry.tables.axes import Axis, Cat, Flat, Leaf, blocks, leaves, nesting, parse, rename, show, size

SIZES = {"a": 1, "b": 2, "c": 3, "head_2": 2}

words = st.builds(Leaf, st.sampled_from(sorted(SIZES)), st.booleans())
constants = st.builds(Leaf, st.sampled_from(["1", "2", "3"]))


def several(axis: st.SearchStrategy[Axis]) -> st.SearchStrategy[Axis]:
    parts = st.lists(axis, min_size=1, max_size=3).map(tuple)
    return st.builds(Flat, parts) | st.builds(Cat, parts)


axis = st.recursive(words | constants, several, max_leaves=5)
expressions = st.lists(axis, min_size=1, max_size=3).map(tuple)


@given(expressions)
def test_what_is_shown_is_read_back(axes):
    assert parse(show(axes)) == axes
    assert parse("  ".join(show(axes).split(" ")) + "  ") == axes  # white space does not matter


def test_reads_the_shapes_of_real_tables():
    assert parse("patch' 2 stream") == (Leaf("patch", True), Leaf("2"), Leaf("stream"))
    assert parse("(head [qk | qk' | vo])") == (Flat((Leaf("head"), Cat((Leaf("qk"), Leaf("qk", True), Leaf("vo"))))),)
    assert parse("") == ()


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("(head qk", "missing"),
        ("[qk | vo", "missing"),
        ("head)", "unexpected ')'"),
        ("qk ]", "unexpected ']'"),
        ("a | b", "unexpected '|'"),
        ("()", "empty"),
        ("(a | b)", "brackets"),
        ("[a b]", "exactly one axis"),
        ("[a | ]", "exactly one axis"),
        ("[a | b)", "unexpected ')'"),
        ("stream vo-qk", "-qk"),
        ("stream ''", "''"),
        ("stream, ffn", ", ffn"),
    ],
)
def test_errors_quote_the_expression(expression, complaint):
    with pytest.raises(ValueError) as error:
        parse(expression)
    assert f"'{expression}'" in str(error.value)
    assert complaint in str(error.value)


@given(expressions)
def test_views_cover_every_entry_once_and_write_through(axes):
    shape = tuple(size(one, SIZES) for one in axes)
    tensor = torch.zeros(shape)
    pieces = blocks(tensor, axes, SIZES)
    for piece, of in pieces:
        assert piece.shape == tuple(size(leaf, SIZES) for leaf in of)
        piece += 1
    assert bool((tensor == 1).all())
    assert sum(piece.numel() for piece, _ in pieces) == tensor.numel()
    assert {leaf for _, of in pieces for leaf in of} == set(leaves(axes))


def test_fused_attention_is_cut_into_three_views():
    """GPT-2's c_attn holds q, k and v of all heads side by side; GPT-NeoX's holds them head by head."""
    q, k, v = torch.randn(3, 5, 2, 3).unbind()  # (stream, head, inner)
    sizes = {"stream": 5, "head": 2, "qk": 3, "vo": 3}
    side = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    mixed = torch.cat([q, k, v], 2).flatten(1)
    for tensor, text in ((side, "[(head qk) | (head qk') | (head vo)]"), (mixed, "(head [qk | qk' | vo])")):
        found = blocks(tensor, parse("stream' " + text), sizes)
        assert [[(leaf.space, leaf.dual) for leaf in of] for _, of in found] == [
            [("stream", True), ("head", False), inner] for inner in (("qk", False), ("qk", True), ("vo", False))
        ]
        for (piece, _), expected in zip(found, (q, k, v), strict=True):
            assert torch.equal(piece, expected)


def test_nesting_names_what_stands_before():
    found = {(leaf.space, outer) for leaf, outer in nesting(parse("(kv group qk) (kv [qk' | 2 vo])".replace("2 ", "")))}
    assert found == {
        ("kv", ()),
        ("group", ("kv",)),
        ("qk", ("kv", "group")),
        ("qk", ("kv",)),
        ("vo", ("kv",)),
    }
    assert list(nesting(parse("(3 head qk)")))[-1] == (Leaf("qk"), ("head",))  # a constant carries nothing


@given(expressions)
def test_rename_changes_names_only(axes):
    away = {name: name + "x" for name in SIZES}
    back = {new: old for old, new in away.items()}
    there = tuple(rename(one, away) for one in axes)
    assert tuple(rename(one, back) for one in there) == axes
    assert {leaf.space for leaf in leaves(there) if not leaf.constant}.isdisjoint(SIZES)


def test_size_of_an_unknown_space_raises():
    with pytest.raises(KeyError):
        size(parse("(head qk)")[0], {"head": 2})
