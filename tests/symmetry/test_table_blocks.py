# SPDX-License-Identifier: Apache-2.0
"""Stages of different widths, layers that differ, towers that stand still, factors per channel, an axis of heads."""

from __future__ import annotations

import pytest

from onebasin.symmetry import TableError, read_table, resolve

STAGES = """
family stages
layers depths
size   head = heads
spaces
    pixel   fixed
    label   labels
    stream  linear       stream     per stage
    head    permutation  attention  per layer
    vo      linear       attention  per layer, head
tensors
    first          stream.first pixel'
layer stage.{}.block.{}
    norm           layernorm: stream -> inner
    v              (head vo) inner'
    o              stream (head vo')
layer stage.{}
    merge.norm     layernorm: (4 stream) -> (4 merged)
    merge.weight   stream.next (4 merged')
heads
    last           label stream.last'
"""
SHAPES = {"first": (6, 3), "last": (2, 12)}
for stage, (width, blocks) in enumerate([(6, 2), (12, 1)]):
    for block in range(blocks):
        SHAPES |= {f"stage.{stage}.block.{block}.{name}": (width, width) for name in "vo"}
        SHAPES |= {f"stage.{stage}.block.{block}.norm": (width,)}
SHAPES |= {"stage.0.merge.norm": (24,), "stage.0.merge.weight": (12, 24)}
CONFIG = {"depths": [2, 1], "heads": [2, 3]}


def test_every_stage_has_a_stream_and_heads_of_its_own() -> None:
    signature = resolve(read_table(STAGES), SHAPES, CONFIG)
    assert {key: signature.sizes[key] for key in ("stream.0", "stream.1")} == {"stream.0": 6, "stream.1": 12}
    assert signature.sizes["stage.0.block.1.head"] == 2 and signature.sizes["stage.1.block.0.head"] == 3
    assert signature.root["stage.0.merged"] == "stream.0"
    norm = signature.tensors["stage.0.merge.norm"].norm
    assert norm is not None and norm.copies == 4


def test_stages_run_one_after_the_other() -> None:
    order = list(resolve(read_table(STAGES), SHAPES, CONFIG).tensors)
    assert order.index("stage.0.block.1.o") < order.index("stage.0.merge.norm") < order.index("stage.1.block.0.norm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stream.first pixel'", "stream pixel'", "'stream' has no stage here"),
        ("stream.first pixel'", "stream.next pixel'", "'stream.next' has no stage here"),
        ("label stream.last'", "label.last stream.last'", "'label.last' has no stage here"),
        ("stream.next (4", "flow.next (4", "undeclared space 'flow'"),
    ],
)
def test_a_stage_that_is_not_there_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read_table(STAGES.replace(old, new))


def test_layers_are_counted_over_all_stages() -> None:
    with pytest.raises(TableError, match="the config has 4 layers, the weights have 3"):
        resolve(read_table(STAGES), SHAPES, {**CONFIG, "depths": [2, 2]})


LAYERS = """
family layers
still  {|model.}tower.
spaces
    stream  linear       stream
    ffn     permutation  ffn     per layer
    head    permutation  attention  per layer
    vo      linear       attention  per layer, head
layer layer.{}
    v          stream' head vo
    o          stream head vo'
    scale      stream                 ; scales o
    when layer<dense
        up         ffn stream'
        down       stream ffn'
    otherwise
        experts    ffn stream'
heads
    /head      4 stream'
"""


def layers(count: int = 2) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.tower.any.weight": (5, 5, 2), "head": (4, 6)}
    for i in range(count):
        shapes |= {f"layer.{i}.{name}": (6, 2, 3) for name in "vo"} | {f"layer.{i}.scale": (6,)}
        shapes |= {f"layer.{i}.experts": (8, 6)} if i else {f"layer.{i}.up": (8, 6), f"layer.{i}.down": (6, 8)}
    return shapes


def test_a_tower_stands_still_and_is_kept() -> None:
    signature = resolve(read_table(LAYERS), layers(), {"dense": 1})
    entry = signature.tensors["tower.any.weight"]
    assert entry.name == "model.tower.any.weight" and not list(signature.leaves(entry))


def test_heads_on_an_axis_of_their_own_have_a_map_each() -> None:
    signature = resolve(read_table(LAYERS), layers(), {"dense": 1})
    assert signature.spaces["layer.0.vo"].batch == ("layer.0.head",)
    assert signature.spaces["layer.0.head"].batch == ()


def test_a_factor_per_channel_names_what_it_multiplies() -> None:
    signature = resolve(read_table(LAYERS), layers(), {"dense": 1})
    assert signature.tensors["layer.1.scale"].scaled == ["layer.1.o"]
    assert signature.tensors["layer.1.scale"].diagonal and not signature.tensors["layer.1.o"].diagonal


def test_layers_that_lack_a_tensor_or_have_one_too_many_are_named() -> None:
    table = read_table(LAYERS)
    shapes = layers()
    with pytest.raises(TableError, match=r"lack 'layer\.1\.experts'"):
        resolve(table, {name: shape for name, shape in shapes.items() if "experts" not in name}, {"dense": 1})
    with pytest.raises(TableError, match=r"has 'layer\.1\.up' only in other layers"):
        resolve(table, {**shapes, "layer.1.up": (8, 6)}, {"dense": 1})
    with pytest.raises(TableError, match="the config lacks 'dense'"):
        resolve(table, shapes, {})
