# SPDX-License-Identifier: Apache-2.0
"""Tables whose lines, blocks and spaces hold for some configurations, or for some layers, only."""

from __future__ import annotations

import pytest

from onebasin.symmetry import Signature, TableError, read_table, resolve
from onebasin.symmetry.tables.conditions import lookup

TABLE = """
family toy
types  toy
layers depth
refuse mirrored=True its halves are one another's image

spaces
    vocab   fixed
    stream  linear       stream
    stream  ones         stream ; when plain=True
    ffn     permutation  ffn     per layer
    gate    permutation  ffn     per layer
    inner = stream ; when lacks norm.weight

tensors
    embed.weight    vocab stream

layer layers.{}
    norm.weight?    layernorm: stream -> inner
    when lacks gate.weight
        up.weight       ffn inner'
        down.weight     stream ffn'
    when lacks up.weight
        gate.weight     gate inner'
        out.weight      stream gate'

tensors ; when memory=True
    memory.weight   vocab stream'

heads
    head.weight?    vocab stream'
"""
UP = {"up.weight": (5, 4), "down.weight": (4, 5)}
GATE = {"gate.weight": (3, 4), "out.weight": (4, 3)}


def shapes(*layers: dict[str, tuple[int, int]], norms: bool = True) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (7, 4), "head.weight": (7, 4)}
    for number, layer in enumerate(layers):
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        if norms:
            found[f"layers.{number}.norm.weight"] = (4,)
    return found


def fit(given: dict[str, tuple[int, ...]], **config: object) -> Signature:
    return resolve(read_table(TABLE), given, {"depth": 2, **config})


def test_layers_of_two_kinds() -> None:
    signature = fit(shapes(UP, GATE))
    assert {key for key, space in signature.spaces.items() if space.part == "ffn"} == {"layers.0.ffn", "layers.1.gate"}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({**UP, **GATE}, r"either 'layers\.1\.up\.weight' or 'gate\.weight', not both"),
        ({"up.weight": (5, 4)}, r"lack 'layers\.1\.down\.weight'"),
        ({}, r"lack 'layers\.1\.up\.weight'"),
    ],
)
def test_a_layer_of_neither_kind_or_of_both_is_named(layer: dict[str, tuple[int, int]], message: str) -> None:
    with pytest.raises(TableError, match=message):
        fit(shapes(UP, layer))


def test_a_space_has_another_kind_where_its_condition_holds() -> None:
    assert fit(shapes(UP, UP, norms=False)).kinds["stream"] == "linear"
    assert fit(shapes(UP, UP, norms=False), plain=True).kinds["stream"] == "ones"
    signs = TABLE.replace("stream  ones         stream ;", "stream  pair signs   stream ;")  # a kind of two words
    signature = resolve(read_table(signs), shapes(UP, UP, norms=False), {"depth": 2, "plain": True})
    assert signature.kinds["stream"] == "pair signs"


def test_where_no_layer_has_a_norm_its_readers_read_what_it_would() -> None:
    signature = fit(shapes(UP, UP, norms=False))
    assert [leaf.space for leaf in signature.leaves(signature.tensors["layers.1.up.weight"])][-1] == "stream"


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
def test_what_carries_others_inside_is_only_permuted(activation: str) -> None:
    """A gated neuron that is scaled, or has its sign changed, would not be the same: `up_scale` does so instead."""
    text = """
family gated
types  gated
size   up_scale = 1
spaces
    vocab   fixed
    stream  linear
    ffn     act hidden_act
    up_scale    factor     per ffn
tensors
    embed  vocab stream
    gate   ffn stream'
    up     (ffn up_scale) stream'
    down   stream (ffn up_scale')
    head   vocab stream'
"""
    shapes = {"embed": (7, 4), "gate": (5, 4), "up": (5, 4), "down": (4, 5), "head": (7, 4)}
    signature = resolve(read_table(text), shapes, {"hidden_act": activation})
    assert signature.kinds["ffn"] == "permutation" and signature.kinds["up_scale"] == "factor"


def test_a_norm_without_numbers_is_a_norm() -> None:
    """Its readers read what it puts out; the stream rotates as it does under norms whose weights fold away."""
    table = TABLE.replace(
        "norm.weight?    layernorm: stream -> inner", "norm.weight     layernorm: stream -> inner   ; bare"
    )
    signature = resolve(read_table(table), shapes(UP, UP, norms=False), {"depth": 2})
    assert list(signature.absent) == ["layers.0.norm.weight", "layers.1.norm.weight"]
    assert signature.absent["layers.1.norm.weight"].notes["bare"] == "layers.1.up.weight"
    assert signature.sizes["layers.0.inner"] == 4 and signature.root["layers.0.inner"] == "stream"
    assert signature.kinds["stream"] == "ones"
    with pytest.raises(TableError, match=r"does not know 'layers\.0\.norm\.weight'"):
        resolve(read_table(table), shapes(UP, UP), {"depth": 2})


def test_a_block_may_hold_for_some_configurations_only() -> None:
    given = {**shapes(UP, UP), "memory.weight": (7, 4)}
    assert "memory.weight" in fit(given, memory=True).tensors
    with pytest.raises(TableError, match=r"does not know 'memory\.weight'"):
        fit(given)
    with pytest.raises(TableError, match=r"lack 'memory\.weight'"):
        fit(shapes(UP, UP), memory=True)


def test_a_configuration_without_a_table_is_refused_with_the_reason() -> None:
    with pytest.raises(TableError, match="mirrored = True have no table yet: its halves are one another's image"):
        fit(shapes(UP, UP), mirrored=True)


def test_what_enters_from_outside_stays() -> None:
    """A space that is read and never written, such as the states of an encoder that is another model's."""
    table = TABLE.replace("up.weight       ffn inner'", "up.weight       ffn outside'").replace(
        "    ffn     perm", "    outside linear       stream\n    ffn     perm"
    )
    signature = resolve(read_table(table), shapes(UP, UP, norms=False), {"depth": 2})
    assert signature.kinds["outside"] == "fixed" and signature.kinds["stream"] == "linear"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("    other   ones ; when plain=True", "declare 'other' without a condition before"),
        ("    stream  ones ; plainly", "'plainly' is not a note"),
        ("    stream  ones ; softmax", "'softmax' is not a note of a space"),
        ("refuse mirrored it is so", "write 'refuse KEY=VALUE reason'"),
        ("layer layers.{} ; unless plain=True", "'unless' is not a note"),
    ],
)
def test_a_condition_that_cannot_be_read_is_named_with_its_line(line: str, message: str) -> None:
    at = "    ffn     permutation  ffn     per layer\n"
    with pytest.raises(TableError, match=f"line .*{message}"):
        read_table(TABLE.replace(at, f"{at}{line}\n"))


@pytest.mark.parametrize(
    ("keys", "config", "value"),
    [
        ("even hidden_size / heads * share", {"hidden_size": 24, "heads": 4, "share": 0.5}, 4),
        ("hidden_size / heads", {"hidden_size": 49, "heads": 49}, 1),  # 49 * (1 / 49) is less
        ("hidden_size / heads * share", {"hidden_size": 720, "heads": 12, "share": 0.15}, 9),  # 0.15 * 720 / 12 is less
    ],
)
def test_a_size_rounds_down_where_the_model_s_class_does(keys: str, config: dict[str, float], value: int) -> None:
    assert lookup(config, [keys]) == value


def test_places_of_lists_and_of_what_is_inside() -> None:
    config = {"depths": [2, 3], "vision": {"heads": [4, 5]}, "width": 8}
    assert lookup(config, ["depths.1"]) == 3
    assert lookup(config, ["vision.heads.0"]) == 4
    assert lookup(config, ["depths.2 | width"]) is None
    assert lookup(config, ["depths.2", "width.0", "width"]) == 8


def test_a_factor_has_one_entry_so_shapes_tell_what_stands_beside_it() -> None:
    table = read_table(
        """
family toy
types  toy

spaces
    data   fixed
    ffn    permutation  ffn
    scale  factor       ffn  per ffn

tensors
    up.weight      (ffn scale) data
    down.weight    data (ffn scale')
"""
    )
    signature = resolve(table, {"up.weight": (6, 3), "down.weight": (3, 6)}, {})
    assert signature.sizes["ffn"] == 6


LISTED = """
family toy
types  toy
size head = heads

spaces
    vocab   fixed
    stream  linear       stream
    head    permutation  attention  per layer
    turned  rotary       attention  per layer, head
    turned  linear       attention  per layer, head ; when inner.kinds[layer]=full
    turned  signs        attention  per layer, head ; when inner.kinds[layer]!=full, plain=True

tensors
    embed.weight    vocab stream

layer layers.{}
    q.weight        (head turned) stream'
    k.weight        (head turned') stream'
"""


def turned(plain: bool, *kinds: str) -> list[str]:
    shapes = {"embed.weight": (9, 8)} | {f"layers.{n}.{name}.weight": (8, 8) for n in range(3) for name in "qk"}
    config = {"heads": 2, "plain": plain, "inner": {"kinds": kinds}}
    signature = resolve(read_table(LISTED), shapes, config)
    return [signature.kinds[f"layers.{n}.turned"] for n in range(3)]


def test_a_space_has_another_kind_in_layers_that_a_list_names() -> None:
    assert turned(False, "near", "full", "near") == ["rotary", "linear", "rotary"]
    assert turned(True, "full", "near", "near") == ["linear", "signs", "signs"]
    assert turned(False, "far", "far", "far") == ["rotary"] * 3


def test_a_list_of_layers_that_the_config_lacks_is_named() -> None:
    shapes = {"embed.weight": (9, 8), "layers.0.q.weight": (8, 8), "layers.0.k.weight": (8, 8)}
    with pytest.raises(TableError, match=r"lacks 'inner\.kinds'"):
        resolve(read_table(LISTED), shapes, {"heads": 2})
