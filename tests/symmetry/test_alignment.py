# SPDX-License-Identifier: Apache-2.0
"""Alignments leave the function alone, and obey the group laws with elements inside elements."""

import elements
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from onebasin.symmetry import Alignment, acting_groups, read_table, resolve
from onebasin.symmetry.groups.elements import Linear, Monomial
from onebasin.symmetry.tables.axes import blocks

TABLE = """
family toy
layers depth
size   head = heads
size   kv = kv_heads
size   group = group
size   qk = qk
size   deep = deep

spaces
    vocab   fixed
    stream  linear       stream
    head    permutation  attention  per layer
    qk      linear       attention  per layer, head
    vo      linear       attention  per layer, head
    kv      permutation  attention  per layer
    group   permutation  attention  per layer, kv
    gqk     linear       attention  per layer, kv
    gvo     linear       attention  per layer, kv
    deep    linear       attention  per layer, kv, group
    ffn     relu         ffn        per layer

tensors
    embed           vocab stream

layer l.{}
    fused           [(head qk) | (head qk') | (head vo)] stream'
    fused_bias      [(head qk) | (head qk') | (head vo)]
    mixed           (head [vo | vo]) stream'
    out             stream (head vo')
    q               (kv group gqk) stream'
    k               (kv gqk') stream'
    v               (kv gvo) stream'
    o               stream (kv group gvo')
    deep_in         (kv group deep) stream'
    deep_out        stream (kv group deep')
    up              ffn stream'
    down            stream ffn'
"""

D, HEADS, KV, GROUP, QK, VO, FFN, VOCAB = 4, 3, 2, 3, 2, 3, 5, 6
CONFIG = {"depth": 2, "heads": HEADS, "kv_heads": KV, "group": GROUP, "qk": QK, "deep": 2}
LAYER = {
    "fused": (HEADS * (2 * QK + VO), D),
    "fused_bias": (HEADS * (2 * QK + VO),),
    "mixed": (HEADS * 2 * VO, D),
    "out": (D, HEADS * VO),
    "q": (KV * GROUP * QK, D),
    "k": (KV * QK, D),
    "v": (KV * VO, D),
    "o": (D, KV * GROUP * VO),
    "deep_in": (KV * GROUP * 2, D),
    "deep_out": (D, KV * GROUP * 2),
    "up": (FFN, D),
    "down": (D, FFN),
}
SHAPES = {"embed": (VOCAB, D)} | {f"l.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
SIGNATURE = resolve(read_table(TABLE), SHAPES, CONFIG)
LEVELS = ("paper", "permutation", "orthogonal", "full", "invertible")


def random_alignment(seed, level="full", spaces=None):
    groups = acting_groups(SIGNATURE, level, rescale="joint")
    chosen = {key: group for key, group in groups.items() if spaces is None or SIGNATURE.spaces[key].name in spaces}
    return elements.random_alignment(SIGNATURE, chosen, seed)


def random_tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {role: torch.randn(e.shape, generator=generator).to(dtype) for role, e in SIGNATURE.tensors.items()}


def apply(alignment, tensors):
    return elements.apply(SIGNATURE, alignment, tensors)


def same(a, b, dtype=torch.float64):
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    for role in a:
        assert a[role].dtype == b[role].dtype and a[role].shape == b[role].shape
        torch.testing.assert_close(a[role], b[role], rtol=tolerance, atol=tolerance, msg=lambda m, r=role: f"{r}: {m}")


def function(tensors):
    """A transformer of sorts, that mixes every space of the table: (vocab, vocab)."""
    x = tensors["embed"]
    for i in range(2):
        t = {name: tensors[f"l.{i}.{name}"] for name in LAYER}
        q, k, v = (t["fused"] @ x.T + t["fused_bias"][:, None]).split([HEADS * QK, HEADS * QK, HEADS * VO])
        q, k, v = (part.unflatten(0, (HEADS, -1)) for part in (q, k, v))  # (heads, inner, tokens)
        extra = (t["mixed"] @ x.T).unflatten(0, (HEADS, 2, VO)).sum(1)
        attention = torch.softmax(q.mT @ k, -1)  # (heads, tokens, tokens)
        x = x + ((v + extra) @ attention.mT).flatten(0, 1).T @ t["out"].T
        q = (t["q"] @ x.T).unflatten(0, (KV, GROUP, QK))
        k, v = ((t[name] @ x.T).unflatten(0, (KV, 1, -1)) for name in ("k", "v"))
        attention = torch.softmax(q.mT @ k, -1)
        x = x + (v @ attention.mT).flatten(0, 2).T @ t["o"].T
        deep = (t["deep_in"] @ x.T).unflatten(0, (KV, GROUP, 2))
        x = x + (deep @ torch.softmax(q.mT @ k, -1)).flatten(0, 2).T @ t["deep_out"].T
        x = x + torch.relu(x @ t["up"].T) @ t["down"].T
        x = x / 30  # the residual stream is linear here: a constant keeps numbers small
    return x


def test_the_signature_nests_as_meant():
    batch = {SIGNATURE.spaces[key].name: SIGNATURE.spaces[key].batch for key in SIGNATURE.spaces if ".1." in key}
    assert batch["qk"] == batch["vo"] == ("l.1.head",)
    assert batch["group"] == ("l.1.kv",) and batch["gqk"] == batch["gvo"] == ("l.1.kv",)
    assert batch["deep"] == ("l.1.kv", "l.1.group")
    assert batch["ffn"] == batch["kv"] == batch["head"] == ()


@pytest.mark.parametrize("level", LEVELS)
def test_the_function_stays(level):
    """All but the stream's own basis: the output lives in the stream, so it is taken back by its element."""
    tensors = random_tensors(0)
    alignment = random_alignment(1, level)
    out = function(apply(alignment, tensors))
    stream = alignment.elements.get("stream")
    expected = function(tensors)
    if stream is not None:
        expected = stream.act(expected.T).T
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    assert any(not torch.equal(a, b) for a, b in zip(tensors.values(), apply(alignment, tensors).values(), strict=True))


levels = st.sampled_from(LEVELS)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float64])
spaces = st.none() | st.sets(st.sampled_from(["kv", "group", "deep", "head", "qk", "vo", "gqk", "stream", "ffn"]))


@settings(deadline=None, max_examples=40)
@given(seeds, levels, levels, spaces, spaces, dtypes)
def test_after_applies_one_then_the_other(seed, one, two, some, others, dtype):
    first, second = random_alignment(seed, one, some), random_alignment(seed + 1, two, others)
    tensors = random_tensors(seed, dtype)
    same(apply(second.after(first), tensors), apply(second, apply(first, tensors)), dtype)


@settings(deadline=None, max_examples=40)
@given(seeds, levels, spaces, dtypes)
def test_inverse_undoes_on_both_sides(seed, level, some, dtype):
    alignment = random_alignment(seed, level, some)
    tensors = random_tensors(seed, dtype)
    same(apply(alignment.inverse(), apply(alignment, tensors)), tensors, dtype)
    same(apply(alignment, apply(alignment.inverse(), tensors)), tensors, dtype)
    same(apply(alignment.inverse().after(alignment), tensors), tensors, dtype)
    same(apply(alignment.inverse().inverse(), tensors), apply(alignment, tensors), dtype)


@settings(deadline=None, max_examples=40)
@given(seeds, levels, levels, levels)
def test_composition_is_associative_and_empty_is_the_identity(seed, one, two, three):
    a, b, c = (random_alignment(seed + i, level) for i, level in enumerate((one, two, three)))
    tensors = random_tensors(seed)
    same(apply(a.after(b).after(c), tensors), apply(a.after(b.after(c)), tensors))
    same(apply(a.after(b).inverse(), tensors), apply(b.inverse().after(a.inverse()), tensors))
    for found in (a.after(Alignment()), Alignment().after(a)):
        same(apply(found, tensors), apply(a, tensors))
    assert all(Alignment().apply(SIGNATURE, role, tensor) is tensor for role, tensor in tensors.items())


@settings(deadline=None, max_examples=15)
@given(seeds, levels, spaces)
def test_saved_and_loaded_is_the_same_to_the_bit(tmp_path_factory, seed, level, some):
    alignment = random_alignment(seed, level, some)
    path = tmp_path_factory.mktemp("alignment") / "a.safetensors"
    alignment.save(path)
    loaded = Alignment.load(path)
    assert set(loaded) == set(alignment)
    for key in alignment:
        before, after = vars(alignment.elements[key]), vars(loaded.elements[key])
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert (after[name] is None) if tensor is None else torch.equal(after[name], tensor)
    tensors = random_tensors(seed)
    same(apply(loaded, tensors), apply(alignment, tensors))
    same(apply(loaded.inverse().after(loaded), tensors), tensors)  # the nesting was saved too


def test_what_is_no_alignment_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        Alignment.load(path)
    path.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        Alignment.load(path)
    save_file({"x": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="contains no alignment"):
        Alignment.load(path)


def test_the_input_is_never_written_into():
    tensors = random_tensors(0)
    copies = {role: tensor.clone() for role, tensor in tensors.items()}
    apply(random_alignment(0), tensors)
    assert all(torch.equal(tensors[role], copies[role]) for role in tensors)


def test_only_a_permutation_carries_others():
    head = {"l.0.head": Linear(torch.eye(HEADS))}
    inner = random_alignment(0, spaces={"qk"})
    with pytest.raises(ValueError, match=r"l\.0\.head"):
        Alignment(head).after(inner)


def test_group_permutations_move_with_their_kv_heads():
    """By hand: the first kv head keeps its queries' order, the second reverses it; then the two swap."""
    first = Alignment({"l.0.group": Monomial(torch.tensor([[0, 1, 2], [2, 1, 0]]))}, {"l.0.group": ("l.0.kv",)})
    swap = Alignment({"l.0.kv": Monomial(torch.tensor([1, 0]))})
    tensor = torch.arange(float(KV * GROUP * QK)).repeat(D, 1).T.contiguous()
    found = swap.after(first).apply(SIGNATURE, "l.0.q", tensor)
    view = blocks(found, SIGNATURE.tensors["l.0.q"].axes, SIGNATURE.sizes)[0][0][:, :, 0, 0]
    assert view.tolist() == [[10, 8, 6], [0, 2, 4]]
    assert swap.after(first).elements["l.0.group"].index.tolist() == [[2, 1, 0], [0, 1, 2]]


NORMED = """
family normed
layers depth

spaces
    vocab   fixed
    stream  linear  stream

tensors
    embed   vocab stream
    norm    rmsnorm: stream -> final
    head    vocab final'
"""


def test_a_norm_weight_is_permuted_but_must_be_folded_before_a_rotation():
    signature = resolve(read_table(NORMED), {"embed": (5, 3), "norm": (3,), "head": (5, 3)}, {})
    weight = torch.tensor([1.0, 2.0, 3.0])
    turn = Alignment({"stream": Monomial(torch.tensor([2, 0, 1]), torch.tensor([1.0, -1.0, 1.0]))})
    assert turn.apply(signature, "norm", weight).tolist() == [3, 1, 2]
    rotation = Alignment({"stream": Linear(torch.linalg.qr(torch.randn(3, 3))[0])})
    assert torch.equal(rotation.apply(signature, "norm", torch.ones(3)), torch.ones(3))
    with pytest.raises(ValueError, match="'norm' must be folded"):
        rotation.apply(signature, "norm", weight)


def test_the_same_maps_make_the_same_file(tmp_path):
    """The library keeps metadata in a hash table, whose order differs from file to file."""
    alignment = Alignment({"a": Monomial(torch.tensor([1, 0])), "é": Linear(torch.eye(3))})
    notes = {f'{letter} "\\\n': letter for letter in "abcdefgh"}
    for number in range(8):
        alignment.save(tmp_path / str(number), notes)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    again = Alignment.load(tmp_path / "0")
    assert torch.equal(again.elements["é"].matrix, torch.eye(3))
