# SPDX-License-Identifier: Apache-2.0
"""Tables that are not whole: each is refused in a sentence that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebasin.families import named_table
from onebasin.symmetry import TableError, read_table, resolve

TABLE = """
family toy
layers count
size   head = heads
size   expert = experts

spaces
    vocab   fixed
    expert  permutation
    head    permutation  attention  per layer
    vo      linear       attention  per layer, head
    vo      fixed        attention  per layer, head  ; when deep=True
    ffn     linear       ffn        per layer, expert
    stream  linear       stream

tensors
    embed.weight  vocab stream

layer l.{}
    norm                        rmsnorm: stream -> normed
    v.weight                    (head vo) normed'
    o.weight                    stream (head vo')
    experts.{expert}.up.weight  (expert ffn) normed'

heads
    out.{weight,bias}?  vocab stream'
    lm_head.weight?     vocab stream'  ; tied embed.weight
"""
SHAPES = {"embed.weight": (9, 4), "lm_head.weight": (9, 4), "l.0.norm": (4,), "l.0.v.weight": (4, 4)}
SHAPES |= {"l.0.o.weight": (4, 4), "l.0.experts.0.up.weight": (5, 4)}
CONFIG = {"heads": 2, "experts": 1, "count": 1, "inner": {}, "none": 0, "architectures": ["ToyForText"]}


def test_the_whole_table_fits() -> None:
    assert resolve(read_table(TABLE), SHAPES, CONFIG).sizes["l.0.vo"] == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("out.{weight,bias}?  vocab stream'", "out.{weight,bias}?", r"'out\.\{weight,bias\}\?' has no axes"),
        ("rmsnorm: stream -> normed", "rmsnorm: -> normed", "a norm goes from a space to a space"),
        ("rmsnorm: stream -> normed", "rmsnorm: 4 -> normed", "a norm goes from a space to a space"),
        ("rmsnorm: stream -> normed", "rmsnorm: flow -> normed", "undeclared space 'flow'"),
        ("(head vo) normed'", "(" * 5000 + "head vo) normed'", "brackets are nested more than 20 deep"),
        ("per layer, head  ; when", "per layer, heads  ; when", "'vo' is per 'heads', which is not a space"),
        ("v.weight ", "v.{}.weight ", "has a layer index"),
        ("experts.{expert}.up", "experts.{head}.up", "only one space, of its axes, may be an index"),
        ("experts.{expert}.up", "{expert}.{expert}.up", "only one space, of its axes, may be an index"),
    ],
)
def test_a_line_that_says_nothing_possible_is_named(old: str, new: str, message: str) -> None:
    assert old in TABLE
    with pytest.raises(TableError, match=message):
        read_table(TABLE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers count", "layers inner", "'inner' .number of layers. is not an integer"),
        ("head = heads", "head = inner * 2", r"'inner \* 2' is not a number in the config"),
        ("head = heads", "head = heads / none", "'heads / none' divides by zero"),
        ("lm_head.weight?     vocab stream'", "lm_head.weight?     stream'", "'lm_head.weight' has the axes 'stream''"),
        (
            "lm_head.weight?     vocab stream'",
            "lm_head.weight?     ffn stream'",
            "'lm_head.weight' has an axis in 'ffn', which no",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(old: str, new: str, message: str) -> None:
    assert old in TABLE
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    with pytest.raises(TableError, match=message):
        resolve(read_table(TABLE.replace(old, new)), tied, CONFIG)


@pytest.mark.parametrize("name", ["x" * 300, "../families/bert", "bert.txt"])
def test_what_is_included_is_a_family(name: str, tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(TABLE.replace("layers", f"include {name}\nlayers"))
    with pytest.raises(TableError, match="there is no family"):
        named_table(str(tmp_path / "table.txt"))
