# SPDX-License-Identifier: Apache-2.0
"""Tables: what cannot be read says where, and what can be read meets a checkpoint tensor by tensor."""

import pytest

from onebasin.symmetry import TableError, read_table, resolve
from onebasin.symmetry.tables.axes import show

TABLE = """\
family toy
types  toy
prefix model.
layers depth
size   head = heads | num_heads
ignore l.{}.mask

spaces
    vocab   fixed
    stream  linear       stream
    head    permutation  attention  per layer
    qk      linear       attention  per layer, head
    vo      linear       attention  per layer, head
    ffn     act act      ffn        per layer

tensors
    embed.weight                vocab stream
    norm.{weight|gamma}         layernorm: stream -> final

layer l.{}
    norm.{weight|gamma}         layernorm: stream -> inner
    fused                       [(head qk) | (head qk') | (head vo)] inner'
    o                           stream (head vo')
    up                          ffn inner'                              ; when gated!=True
    up                          ffn inner'                              ; when gated=True
    gate                        ffn inner'                              ; when gated=True
    down                        stream ffn'
    bias?                       stream

heads
    lm.weight?                  vocab final'                            ; tied embed.weight
"""
LAYER = {"norm.weight": (6,), "fused": (32, 6), "o": (6, 8), "up": (10, 6), "down": (6, 10)}
SHAPES = {"embed.weight": (9, 6), "norm.weight": (6,)} | {
    f"l.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()
}
CONFIG = {"depth": 2, "heads": 2, "act": "gelu", "tie_word_embeddings": True}
# fused is 2 heads x (qk + qk + vo) rows; vo = 4 comes from o, so qk = (16 - 4) / 2 = 6.


def meet(shapes=SHAPES, table=TABLE, **config):
    return resolve(read_table(table, "toy.txt"), shapes, CONFIG | config)


def without(*names):
    return {name: shape for name, shape in SHAPES.items() if name not in names}


# --- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "complaint"),
    [
        ("types  toy", "kinds  toy", 2, "'kinds' is not a heading"),
        ("    vocab   fixed", "    vocab   frozen", 9, "'frozen' is not a kind of space"),
        ("    vocab   fixed", "    vocab", 9, "space 'vocab' needs a kind"),
        (
            "    qk      linear       attention",
            "    head    linear       attention",
            12,
            "'head' is declared twice",
        ),
        ("vocab stream\n", "vocab (stream\n", 17, "axes 'vocab (stream'"),
        ("stream (head vo')", "stream (head | vo')", 23, "'|' belongs inside brackets"),
        ("; tied embed.weight", "; belongs ffn", 31, "'belongs' is not a note"),
    ],
)
def test_errors_name_the_file_and_the_line(old, new, line, complaint):
    assert old in TABLE
    with pytest.raises(TableError) as error:
        read_table(TABLE.replace(old, new, 1), "toy.txt")
    assert str(error.value).startswith(f"toy.txt, line {line}: ")
    assert complaint in str(error.value)


def test_an_undeclared_space_is_named_with_its_line():
    with pytest.raises(TableError, match=r"toy\.txt.*'l\.\{\}\.down .*undeclared space 'neurons'"):
        read_table(TABLE.replace("stream ffn'", "stream neurons'"), "toy.txt")


@pytest.mark.parametrize("text", ["", "family toy\n", "tensors\n    a  2\n", "# only a comment\n"])
def test_a_table_without_family_or_tensors_is_none(text):
    with pytest.raises(TableError, match=r"toy\.txt: a table needs"):
        read_table(text, "toy.txt")


def test_an_indented_line_needs_a_section():
    with pytest.raises(TableError, match=r"toy\.txt, line 1: an indented line"):
        read_table("    vocab fixed\n", "toy.txt")


# --- meeting a checkpoint -----------------------------------------------------------------------------------


def test_sizes_are_solved_from_shapes_and_counts():
    sizes = meet().sizes
    assert {k: sizes[k] for k in ("vocab", "stream", "l.0.head", "l.0.qk", "l.0.vo", "l.1.ffn", "final")} == {
        "vocab": 9, "stream": 6, "l.0.head": 2, "l.0.qk": 6, "l.0.vo": 4, "l.1.ffn": 10, "final": 6,
    }  # fmt: skip
    other = resolve(read_table(TABLE), SHAPES, {"depth": 2, "num_heads": 4, "act": "gelu"})
    assert (other.sizes["l.0.qk"], other.sizes["l.0.vo"]) == (3, 2)


def test_what_is_read_beside_an_index_is_no_output():
    table = TABLE.replace("    vocab   fixed\n", "    vocab   fixed\n    pixel   fixed\n").replace(
        "vocab final'                            ; tied embed.weight", "vocab (final' pixel)"
    )
    signature = meet(SHAPES | {"lm.weight": (9, 24)}, table)
    assert [key for key, space in signature.spaces.items() if space.output] == ["vocab", "pixel"]


def test_every_tensor_is_placed_once():
    signature = meet(SHAPES | {"lm.weight": (9, 6), "l.0.mask": (3, 3)})
    assert {entry.name for entry in signature.tensors.values()} == {*SHAPES, "lm.weight"}
    assert [e.layer for e in signature.tensors.values() if e.role.endswith("down")] == [0, 1]
    assert signature.layers == [0, 1]


def test_prefix_and_old_spellings_are_read_and_kept():
    shapes = {"model." + name.replace("norm.weight", "norm.gamma"): shape for name, shape in SHAPES.items()}
    signature = meet(shapes | {"lm.weight": (9, 6)})
    assert signature.tensors["l.0.norm.weight"].name == "model.l.0.norm.gamma"
    assert set(signature.tensors) == {*SHAPES, "lm.weight"}  # roles know neither prefix nor spelling


def test_layers_need_not_start_at_zero_nor_be_sorted():
    def far(name):
        return name.replace("l.0.", "l.10.").replace("l.1.", "l.9.")

    signature = meet({far(name): shape for name, shape in reversed(SHAPES.items())})
    assert signature.tensors["l.9.down"].layer == 0 and signature.tensors["l.10.down"].layer == 1


def test_kinds_follow_from_what_touches_a_space():
    headed = SHAPES | {"lm.weight": (9, 6)}
    kinds = meet(headed).kinds
    assert kinds["stream"] == "ones" and kinds["l.0.ffn"] == "permutation" and kinds["l.0.qk"] == "linear"
    assert meet(headed, TABLE.replace("layernorm", "rmsnorm")).kinds["stream"] == "orthogonal"
    post = TABLE.replace("-> inner", "-> stream").replace("inner'", "stream'")
    assert meet(headed, post).kinds["stream"] == "permutation"
    assert meet().kinds["stream"] == "fixed"  # without a head the stream itself is the output
    assert meet(act="relu").kinds["l.0.ffn"] == "relu" and meet(act="tanh").kinds["l.0.ffn"] == "odd"


def test_norms_unite_their_spaces():
    signature = meet()
    assert {signature.root[key] for key in ("final", "l.0.inner", "l.1.inner")} == {signature.root["stream"]}
    assert signature.root["l.0.qk"] != signature.root["l.1.qk"]


TIED = """
family tied
spaces
    vocab   fixed
    narrow  linear
    wide    linear
    code    linear
tensors
    embed   vocab narrow
    widen   wide narrow'
    shrink  code wide'
heads
    lm?     vocab code'   ; tied embed
"""


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_ties_unify_spaces(config):
    shapes = {"embed": (9, 4), "widen": (6, 4), "shrink": (4, 6)}
    tied = config.get("tie_word_embeddings", True)
    signature = resolve(read_table(TIED), shapes | {"lm": (9, 4)}, config)
    assert (signature.root["code"] == signature.root["narrow"]) == tied
    assert signature.tensors["lm"].alias == ("embed" if tied else None)
    assert "lm" not in [role for roles in signature.touching.values() for role in roles] or not tied
    assert signature.root["wide"] not in (signature.root["narrow"], signature.root["code"])


def test_when_chooses_lines_by_the_config():
    assert "l.0.gate" not in meet().tensors
    gated = SHAPES | {f"l.{i}.gate": (10, 6) for i in range(2)}
    assert meet(gated, gated=True).tensors["l.1.gate"].shape == (10, 6)
    with pytest.raises(TableError, match=r"does not know 'l\.0\.gate', 'l\.1\.gate'"):
        meet(gated)
    with pytest.raises(TableError, match=r"lack 'l\.0\.gate', 'l\.1\.gate'"):
        meet(gated=True)


LATER = """family late
layers depth
spaces
    vocab   fixed
    stream  linear  stream
    ffn     permutation  ffn  per layer
    mid = stream ; when lacks norm
tensors
    embed   vocab stream
layer l.{}
    norm    rmsnorm: stream -> mid  ; when layer>=1
    up      ffn mid'
    down    stream ffn'
"""


def test_the_first_layers_may_lack_a_norm():
    """Where it is absent, its reader reads the stream itself; where it stands too early, or is gone, it is named."""
    shapes = {"embed": (5, 4), "l.1.norm": (4,)}
    shapes |= {f"l.{i}.{name}": shape for i in range(2) for name, shape in (("up", (3, 4)), ("down", (4, 3)))}
    signature = resolve(read_table(LATER), shapes, {"depth": 2})
    assert show(signature.tensors["l.0.up"].axes) == "l.0.ffn stream'"
    assert show(signature.tensors["l.1.up"].axes) == "l.1.ffn l.1.mid'"
    with pytest.raises(TableError, match=r"'l\.0\.norm' only in other layers"):
        resolve(read_table(LATER), shapes | {"l.0.norm": (4,)}, {"depth": 2})
    with pytest.raises(TableError, match=r"lack 'l\.1\.norm'"):
        resolve(read_table(LATER), {name: shape for name, shape in shapes.items() if "norm" not in name}, {"depth": 2})


GROUPED = """family grouped
size band = bands
spaces
    sound   fixed
    band    permutation  stream
    inside  permutation  stream  per band
tensors
    write   (band inside) sound
    conv    (band inside) inside' 3
"""


def test_a_norm_of_parts_side_by_side_takes_each_head_by_itself():
    text = """
family f
types  f
size   head = heads
spaces
    vocab  fixed
    head   permutation
    rope   rotary  per head
    nope   linear  per head
tensors
    q.weight     (head [rope | nope]) vocab
    norm.weight  layernorm: [rope | nope] -> (head [rope | nope])
    k.weight     (head [rope' | nope']) vocab
    size.weight  vocab (head rope)
"""
    shapes = {"q.weight": (10, 4), "norm.weight": (10,), "k.weight": (10, 4), "size.weight": (4, 4)}
    signature = resolve(read_table(text), shapes, {"heads": 2})
    norm = signature.tensors["norm.weight"].norm
    assert norm is not None and norm.parts == norm.over == ("rope", "nope") and norm.source == "nope"
    assert signature.sizes["nope"] == 3
    assert signature.kinds["rope"] == "fixed" and signature.kinds["nope"] == "permutation"  # means are taken away
    other = text.replace("-> (head [rope | nope])", "-> normed")
    with pytest.raises(TableError, match="line 12: a norm of several parts"):
        read_table(other)


def test_a_grouped_convolution_reads_the_band_that_it_writes():
    signature = resolve(read_table(GROUPED), {"write": (6, 4), "conv": (6, 3, 3)}, {"bands": 2})
    assert signature.spaces["inside"].size == 3
    assert signature.spaces["inside"].batch == ("band",)


@pytest.mark.parametrize(
    ("shapes", "config", "complaint"),
    [
        (SHAPES | {"stranger": (3,)}, {}, "toy: the table does not know 'stranger'"),
        (without("l.1.down"), {}, r"toy: the weights lack 'l\.1\.down'"),
        (without("embed.weight"), {}, r"lack 'embed\.weight'"),
        (SHAPES | {"norm.gamma": (6,)}, {}, r"'norm\.weight' and 'norm\.gamma' are spellings"),
        (SHAPES | {"l.0.o": (6, 7)}, {}, r"'l\.0\.o' has shape \(6, 7\): 7 does not split"),
        (SHAPES | {"l.0.fused": (34, 6)}, {}, r"'l\.0\.fused' has shape \(34, 6\): 34 does not split"),
        (
            SHAPES | {"l.1.down": (5, 10)},
            {},
            r"'l\.1\.down' has shape \(5, 10\): 'stream' should be 6, not 5",
        ),
        (SHAPES | {"l.1.down": (6, 10, 1)}, {}, r"'l\.1\.down' has shape \(6, 10, 1\), its axes are"),
        (SHAPES, {"depth": 3}, "config has 3 layers, the weights have 2"),
        (SHAPES, {"heads": None}, r"config lacks 'heads or num_heads' \(number of 'head'\)"),
        (SHAPES, {"heads": 0}, "config lacks 'heads"),
    ],
)
def test_what_does_not_fit_is_named(shapes, config, complaint):
    with pytest.raises(TableError, match=complaint):
        meet(shapes, **config)


def test_sizes_that_shapes_cannot_tell_are_asked_for():
    text = "family f\nspaces\n    a  linear\n    b  linear\ntensors\n    w  (a b)\n"
    with pytest.raises(TableError, match=r"'w': shapes do not determine the sizes in '\(a b\)'"):
        resolve(read_table(text), {"w": (6,)}, {})
    assert resolve(read_table("size a = 2\n" + text), {"w": (6,)}, {}).sizes == {"a": 2, "b": 3}
