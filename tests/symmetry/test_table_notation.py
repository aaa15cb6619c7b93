# SPDX-License-Identifier: Apache-2.0
"""What tables say in short: two tensors on a line, blocks, properties of spaces, spaces that are others."""

from __future__ import annotations

from typing import Any

import pytest

from onebasin.symmetry import Signature, TableError, read_table, resolve
from onebasin.symmetry.tables.axes import show

TABLE = """
family short
size   head = heads

spaces
    vocab       fixed
    stream      linear       stream                      post-norm
    head        permutation  attention
    qk          linear       attention  per head         invisible
    vo          linear       attention  per head         passes
    ffn gate    permutation  ffn
    inner = stream ; when lacks norm.weight

tensors
    embed.weight             vocab stream
    norm.{weight,bias}?      layernorm: stream -> inner
    query.{weight,bias}      (head qk) inner'
    key.{weight,bias}        (head qk') inner'
    fused.{weight,bias?}     inner' [(head qk) | (head qk') | (head vo)]
    out.{weight,bias}        (head vo') stream
    after.{weight|gamma,bias|beta}    layernorm: stream -> stream    ; stays when last=True
    nonlinear
        when kind=gated, deep=True
            gate.{weight,bias}        gate inner'
        otherwise
            when deep=True
                ffn.weight            ffn inner'     ; chooses when kind=odd
            otherwise
                ffn.{weight,bias}     ffn inner'
"""
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (9, 6), "norm.weight": (6,), "norm.bias": (6,), "query.weight": (4, 6), "query.bias": (4,),
    "key.weight": (4, 6), "key.bias": (4,), "fused.weight": (6, 14), "fused.bias": (14,), "out.weight": (6, 6),
    "out.bias": (6,), "after.gamma": (6,), "after.beta": (6,),
}  # fmt: skip
FFN = {"ffn.weight": (5, 6), "ffn.bias": (5,)}
GATE = {"gate.weight": (7, 6), "gate.bias": (7,)}


def fit(more: dict[str, tuple[int, ...]] = FFN, without: str = "-", **config: Any) -> Signature:
    shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith(without)}
    return resolve(read_table(TABLE), shapes | more, {"heads": 2, **config})


def axes(signature: Signature, role: str) -> str:
    return show(signature.tensors[role].axes)


def test_a_bias_has_the_axis_that_its_weight_writes_to() -> None:
    signature = fit()
    assert axes(signature, "query.bias") == "(head qk)" and axes(signature, "key.bias") == "(head qk')"
    assert axes(signature, "fused.bias") == "[(head qk) | (head qk') | (head vo)]"  # a matrix with the input first
    assert axes(signature, "out.bias") == "stream"
    assert axes(signature, "norm.bias") == "inner" and signature.tensors["norm.bias"].norm is None
    assert signature.tensors["after.bias"].name == "after.beta"


def test_each_of_two_tensors_may_be_absent_by_itself() -> None:
    assert "fused.bias" not in fit(without="fused.bias").tensors
    with pytest.raises(TableError, match=r"lack 'query\.bias'"):
        fit(without="query.bias")
    with pytest.raises(TableError, match=r"lack 'fused\.weight'"):
        fit(without="fused.weight")


def test_constants_are_noted_by_the_space_that_they_are_in() -> None:
    notes = {role: entry.notes for role, entry in fit().tensors.items()}
    assert notes["key.bias"] == {"invisible": "qk'"} and notes["query.bias"] == {}
    assert notes["fused.bias"] == {"invisible": "qk'", "passes": "vo"}
    assert notes["out.bias"] == {} and notes["out.weight"] == {}
    assert notes["after.bias"] == {"passes": "stream"} and notes["norm.bias"] == {}
    assert fit(last=True).tensors["after.bias"].notes == {"stays": ""}


def test_where_a_norm_is_absent_another_space_is_read() -> None:
    signature = fit(without="norm")
    assert axes(signature, "query.weight") == "(head qk) stream'" and "inner" not in signature.spaces


@pytest.mark.parametrize(
    ("config", "more", "roles"),
    [
        ({}, FFN, {"ffn.weight", "ffn.bias"}),
        ({"deep": True}, {"ffn.weight": (5, 6)}, {"ffn.weight"}),
        ({"kind": "gated"}, FFN, {"ffn.weight", "ffn.bias"}),
        ({"kind": "gated", "deep": True}, GATE, {"gate.weight", "gate.bias"}),
    ],
)
def test_blocks_nest_and_one_of_two_holds(config: dict[str, Any], more: Any, roles: set[str]) -> None:
    signature = fit(more, **config)
    assert {role for role, entry in signature.tensors.items() if "nonlinear" in entry.notes} == roles == set(more)
    for other in (FFN, GATE, {"ffn.weight": (5, 6)}):
        if set(other) != roles:
            with pytest.raises(TableError, match=r"does not know|the weights lack"):
                fit(other, **config)


def test_a_note_may_hold_for_some_configurations_only() -> None:
    assert "chooses" in fit({"ffn.weight": (5, 6)}, deep=True, kind="odd").tensors["ffn.weight"].notes
    assert "chooses" not in fit({"ffn.weight": (5, 6)}, deep=True).tensors["ffn.weight"].notes


def test_a_note_may_hold_for_some_layers_only() -> None:
    text = """
family f
spaces
    stream  linear  stream  post-norm
layer l.{}
    norm.{weight,bias}   layernorm: stream -> stream  ; stays when layer<1
"""
    shapes = {f"l.{i}.norm.{name}": (4,) for i in range(3) for name in ("weight", "bias")}
    entries = resolve(read_table(text), shapes, {}).tensors
    assert ["passes" in entries[f"l.{i}.norm.bias"].notes for i in range(3)] == [False, True, True]


def test_a_map_is_shared_by_all_entries_of_what_it_is_not_declared_per() -> None:
    assert fit().spaces["qk"].batch == ("head",)
    shared = resolve(read_table(TABLE.replace("per head         invisible", "invisible")), SHAPES | FFN, {"heads": 2})
    assert shared.spaces["qk"].batch == () and shared.spaces["vo"].batch == ("head",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "key.{weight,bias}        (head qk')",
            "key.{weight,bias}        (qk' head)",
            r"'key\.weight': 'qk' is per head in other tensors alone",
        ),
        ("(head vo') stream", "(vo' head) stream", r"'out\.weight': 'vo' is per head in other tensors alone"),
    ],
)
def test_a_map_for_each_head_needs_the_head_before_it(old: str, new: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        resolve(read_table(TABLE.replace(old, new)), SHAPES | FFN, {"heads": 2})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lacks norm.weight", "lacks nrom.weight", "'lacks nrom.weight' names no tensor of the table"),
        ("inner = stream ;", "inner = steram ;", "'inner = steram' names the undeclared space 'steram'"),
        ("inner = stream ;", "inner = stream odd ;", "write 'NAME = OTHER ; when CONDITION'"),
        ("inner = stream ; when lacks norm.weight", "inner = stream", "write 'NAME = OTHER ; when CONDITION'"),
        ("per head         passes", "per haed         passes", "'vo' is per 'haed', which is not a space"),
        ("per head         passes", "per head         passed", "'passed' is not a property of a space"),
        ("when deep=True", "when deep", "'deep' is not a condition"),
        ("    key.{weight", "        key.{weight", "'query.{weight,bias}' has indented lines below it"),
        ("        when kind=gated, deep=True\n            gate", "        padded\n            gate",
         "'otherwise' follows a block that begins with 'when'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(old: str, new: str, message: str) -> None:
    assert old in TABLE
    with pytest.raises(TableError, match=message):
        read_table(TABLE.replace(old, new))
