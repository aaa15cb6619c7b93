# SPDX-License-Identifier: Apache-2.0
"""Which group acts where, at every level."""

import pytest
import torch

from onebasin.symmetry import LEVELS, acting_groups, read_table, resolve
from onebasin.symmetry.levels import largest_group
from onebasin.symmetry.tables.signature import MOVES, kind_of

TABLE = """
family toy
layers depth
size   head = heads

spaces
    vocab     fixed
    position  rows
    label     labels
    stream    linear       stream
    head      permutation  attention  per layer
    qk        linear       attention  per layer, head
    vo        linear       attention  per layer, head
    ffn       act act      ffn        per layer
    pooled    odd          head

tensors
    embed         vocab stream
    positions     position stream
    final_norm    {norm}: stream -> final

layer l.{}
    norm          {norm}: stream -> {target}
    q             (head qk) {target}'
    k             (head qk') {target}'
    v             (head vo) {target}'
    o             stream (head vo')
    up            ffn {target}'
    down          stream ffn'

heads
    pool          pooled final'
    classify      label pooled'
"""
SHAPES = {"embed": (9, 6), "positions": (7, 6), "final_norm": (6,), "pool": (5, 6), "classify": (2, 5)} | {
    f"l.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "norm": (6,),
        "q": (6, 6),
        "k": (6, 6),
        "v": (8, 6),
        "o": (6, 8),
        "up": (10, 6),
        "down": (6, 10),
    }.items()
}


def signature(norm="rmsnorm", target="inner", act="gelu"):
    text = TABLE.replace("{norm}", norm).replace("{target}", target)
    return resolve(read_table(text), SHAPES, {"depth": 2, "heads": 2, "act": act})


def names(level, rescale="none", **given):
    found = acting_groups(signature(**given), level, rescale=rescale)
    return {key.removeprefix("l.0."): group.name for key, group in found.items() if not key.startswith("l.1.")}


PERMUTED = dict.fromkeys(["stream", "head", "qk", "vo", "ffn", "pooled"], "permutation")


def test_paper_moves_heads_inside_and_neurons_only():
    assert names("paper") == {"qk": "orthogonal", "vo": "orthogonal", "ffn": "permutation"}
    assert names("paper", "after")["qk"] == "orthogonal with scale"
    assert names("paper", act="relu")["ffn"] == "permutation"
    one, other = (acting_groups(signature(), "paper", rescale=rescale)["l.1.vo"] for rescale in ("after", "joint"))
    assert (one.joint, other.joint) == (False, True)


def test_permutation_permutes_every_space_that_may_move():
    for norm in ("rmsnorm", "layernorm"):
        for target in ("inner", "stream"):
            assert names("permutation", norm=norm, target=target) == PERMUTED


def test_orthogonal_rotates_what_no_nonlinearity_touches():
    turned = PERMUTED | {"qk": "orthogonal", "vo": "orthogonal", "pooled": "signed permutation"}
    assert names("orthogonal") == turned | {"stream": "orthogonal"}
    assert names("orthogonal", norm="layernorm") == turned | {"stream": "orthogonal fixing ones"}
    assert names("orthogonal", act="relu") == turned | {"stream": "orthogonal"}
    assert names("orthogonal", act="tanh")["ffn"] == "signed permutation"


def test_a_norm_that_writes_back_leaves_permutations():
    assert names("full", norm="layernorm", target="stream")["stream"] == "permutation"
    assert names("full", norm="rmsnorm", target="stream")["stream"] == "signed permutation"


def test_full_adds_scales():
    assert names("full", "joint")["qk"] == "orthogonal with scale"
    assert names("full", "joint")["stream"] == "orthogonal"  # a norm fixes its scale
    assert names("full", act="relu")["ffn"] == "scaled permutation"


def test_invertible_is_for_what_attention_multiplies():
    found = names("invertible", "joint")
    assert found["qk"] == found["vo"] == "invertible"
    assert found | {"qk": "", "vo": ""} == names("full", "joint") | {"qk": "", "vo": ""}


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_fixed_never_moves(level):
    assert not set(acting_groups(signature(), level, rescale="joint")) & {"vocab", "position", "label"}


@pytest.mark.parametrize("level", LEVELS)
def test_levels_nest_by_dimension(level):
    """Continuous freedom never falls from one level to the next (the paper's set stands apart)."""
    order = ("permutation", "orthogonal", "full", "invertible")
    s = signature()

    def freedom(level):
        return {k: g.dimension(s.sizes[k]) for k, g in acting_groups(s, level, rescale="joint").items()}

    if level in order[1:]:
        lower, upper = freedom(order[order.index(level) - 1]), freedom(level)
        assert all(upper[key] >= lower[key] for key in lower)


def test_parts_and_layers_choose():
    s = signature()
    assert set(acting_groups(s, "full", parts=["ffn"])) == {"l.0.ffn", "l.1.ffn"}
    assert set(acting_groups(s, "paper", layers=[1])) == {"l.1.qk", "l.1.vo", "l.1.ffn"}
    assert set(acting_groups(s, "full", parts=["attention", "stream"], layers=[0])) == {
        "l.0.head", "l.0.qk", "l.0.vo", "stream",
    }  # fmt: skip
    assert acting_groups(s, "full", layers=[], parts=[]) == {}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"level": "everything"}, "unknown match 'everything'; choose from paper, permutation"),
        ({"rescale": "twice"}, "unknown rescale 'twice'; choose from none, after, joint"),
        ({"parts": ["ffn", "embedding"]}, "unknown part 'embedding'; choose from attention, ffn"),
        ({"layers": [0, 7]}, "no layer 7; layers run from 0 to 1"),
        ({"layers": [-1]}, "no layer -1"),
    ],
)
def test_unknown_names_raise(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        acting_groups(signature(), **given)


@pytest.mark.parametrize(("pairs", "kind"), [("rotary", "pair turns"), ("interleaved", "next turns")])
def test_pairs_under_a_norm_without_weight_turn(pairs, kind):
    """What commutes with rotary embeddings and keeps lengths: one angle for each pair."""
    assert kind_of(MOVES[pairs] & MOVES["orthogonal"]) == kind
    group = largest_group(kind)
    assert group.dimension(6) == 3
    turn = group.random(6, (), torch.Generator().manual_seed(0)).matrix
    both = largest_group(pairs).random(6, (), torch.Generator().manual_seed(1)).matrix
    assert torch.allclose(turn @ both, both @ turn) and torch.allclose(turn.mT @ turn, torch.eye(6, dtype=turn.dtype))
