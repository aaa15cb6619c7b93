# SPDX-License-Identifier: Apache-2.0
"""Law 2: every tensor of every model is in its table, exactly once; what does not fit is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

import pytest
import zoo
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from transformers.pytorch_utils import Conv1D

from onebasin import families
from onebasin.families import table_for, tables
from onebasin.models.folder import Folder
from onebasin.symmetry import Signature, TableError, resolve
from onebasin.symmetry.tables.axes import Axis, Cat, Leaf, leaves, nesting
from onebasin.symmetry.tables.signature import MOVES

Saved = Callable[[str], Folder]
Shapes = dict[str, tuple[int, ...]]

HEADED = ["BertForPreTraining", "BertLMHeadModel-cross", "RobertaForSequenceClassification",
          "ElectraForMaskedLM", "DistilBertForMaskedLM", "AlbertForPreTraining", "DebertaV2ForMaskedLM",
          "DebertaForMaskedLM", "GPT2LMHeadModel-cross", "ViTForImageClassification",
          "DeiTForImageClassificationWithTeacher"]  # fmt: skip

# What a base model may lack: its absence alone says nothing.
MAY_LACK = ("pooler.dense.weight", "pooler.dense.bias", "pooler.weight", "pooler.bias", "distillation_token",
            "mask_token", "token_type_embeddings.weight", "rel_embeddings.weight", "encoder.LayerNorm.weight",
            "encoder.LayerNorm.bias", "embeddings_project.bias")  # fmt: skip


def fit(checkpoint: Folder, shapes: Shapes, **config: object) -> Signature:
    return resolve(table_for(checkpoint.config["model_type"]), shapes, {**checkpoint.config, **config})


@pytest.mark.parametrize("case", zoo.CASES)
def test_every_tensor_is_in_the_table_exactly_once(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    names = [name for entry in checkpoint.signature.tensors.values() for name in entry.names]
    assert sorted(names) == sorted(checkpoint.shapes)
    assert not list(checkpoint.others())


KEYS = ("qk", "rope", "rope_half", "nope", "flat", "shared")  # spaces in which queries meet keys, and texts images


def ends(axis: Axis) -> Iterator[Leaf]:
    """The innermost leaves of an axis: qk of (head qk), and each part of a concatenation."""
    if isinstance(axis, Leaf):
        yield axis
    else:
        for part in axis.parts if isinstance(axis, Cat) else axis.parts[-1:]:
            yield from ends(part)


@pytest.mark.parametrize("case", zoo.CASES)
def test_modules_read_their_inputs_and_write_their_outputs(case: str, saved: Saved) -> None:
    """Permutations and rotations do not tell what reads from what writes; the model's modules in memory do.

    Only keys are dual where they are written, since they are read against queries.
    """
    if any(entry.pieces for entry in saved(case).signature.tensors.values()):
        pytest.skip("in memory the experts are fused under other names")
    model = zoo.CASES[case]()
    signature = fit(saved(case), {name: tuple(value.shape) for name, value in model.state_dict().items()})
    entries = {entry.name: entry for entry in signature.tensors.values()}
    assert len(entries) == len(model.state_dict())
    fixed = {key for key, space in signature.spaces.items() if MOVES[space.kind] == frozenset()}
    seen = 0
    for name, module in model.named_modules():
        fused = "in_proj_" if isinstance(module, nn.MultiheadAttention) else ""
        weight = entries.get(f"{name}.{fused}weight")
        if isinstance(module, ParametrizationList):  # wav2vec 2.0's normalized weight: its two parts have no module
            continue
        if weight is None or zoo.is_norm(module):  # a norm, or parameters that stand alone, only write
            alone = (entries.get(f"{name}.{key}") for key, _ in module.named_parameters(recurse=False))
            plain = [entry for entry in alone if entry and len(entry.axes) < 3]  # XLNet's matrices have no module
            assert not any(leaf.dual for entry in plain for leaf in signature.leaves(entry)), name
            continue
        turned = isinstance(module, (nn.Embedding, Conv1D))  # these store the input axis first
        read, written = weight.axes[:2] if turned else weight.axes[1::-1]
        assert all(leaf.dual or leaf.constant for leaf in ends(read) if leaf.space not in fixed), name
        assert all(not leaf.dual or leaf.space.endswith(KEYS) for leaf in ends(written)), name
        bias = entries.get(f"{name}.{fused}bias")
        assert bias is None or bias.axes == (written,), name
        seen += 1
    assert seen >= (2 if case.startswith("XLNet") else 4) * len(signature.layers)


@pytest.mark.parametrize("case", zoo.CASES)
def test_no_axis_is_written_or_read_twice(case: str, saved: Saved) -> None:
    """`stream stream` would be a slip for `stream stream'`; one axis may read and another write a space."""
    signature = saved(case).signature
    fixed = {key for key, space in signature.spaces.items() if space.kind in ("fixed", "rows", "labels")}
    for role, entry in signature.tensors.items():
        for one, other in combinations(entry.axes, 2):
            first, second = ({leaf for leaf in leaves(axis) if not leaf.constant} for axis in (one, other))
            assert all(leaf.space in fixed for leaf in first & second), role


@pytest.mark.parametrize("case", zoo.CASES)
def test_inner_spaces_are_batched_over_heads(case: str, saved: Saved) -> None:
    """All query heads of a group share the map of their key and value head."""
    signature = saved(case).signature
    for entry in signature.tensors.values():
        for leaf, outer in nesting(entry.axes):
            if not leaf.constant and entry.norm is None:
                own = tuple(space for space in outer if signature.spaces[space].name != "group")
                if len(entry.axes) > 1 and entry.axes[-2] != leaf and not outer and leaf.space.endswith(("qk", "vo")):
                    own = tuple(head.space for head in leaves(entry.axes[-2]))  # XLNet: heads on an axis of their own
                grouped = {("band",)} if leaf.space == "inside" else set()  # a convolution reads the band it writes
                if case.startswith("Deepseek"):  # all heads share one rotary key
                    grouped = {()} if leaf.space.endswith(("rope", "rope_half")) else set()
                assert signature.spaces[signature.root[leaf.space]].batch in {own} | grouped


@pytest.mark.parametrize("case", HEADED)
def test_an_unknown_tensor_is_named(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    for extra in ("encoder.layer.0.attention.self.extra.weight", "adapter.weight"):
        with pytest.raises(TableError, match=extra):
            fit(checkpoint, {**checkpoint.shapes, extra: (2, 2)})


@pytest.mark.parametrize("case", HEADED)
def test_a_missing_tensor_is_named(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    for entry in checkpoint.signature.tensors.values():
        if entry.head or entry.name.endswith(MAY_LACK):
            continue
        rest = {name: shape for name, shape in checkpoint.shapes.items() if name != entry.name}
        with pytest.raises(TableError) as error:
            fit(checkpoint, rest)
        if not entry.name.endswith("embeddings_project.weight"):  # then the two widths are said to differ
            assert f"'{entry.name}'" in str(error.value)


@pytest.mark.parametrize("case", HEADED)
def test_a_wrong_shape_is_named(case: str, saved: Saved) -> None:
    """Whichever of two disagreeing tensors the message names, the space on which they disagree is in it."""
    checkpoint = saved(case)
    for entry in checkpoint.signature.tensors.values():
        if entry.layer is None:
            continue
        wrong = (entry.shape[0] + 1, *entry.shape[1:])
        with pytest.raises(TableError, match=r"should be|does not split"):
            fit(checkpoint, {**checkpoint.shapes, entry.name: wrong})
        with pytest.raises(TableError, match="has shape"):
            fit(checkpoint, {**checkpoint.shapes, entry.name: (*entry.shape, 1)})


@pytest.mark.parametrize("case", HEADED)
def test_wrong_counts_in_the_config_are_clear(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    table = table_for(checkpoint.config["model_type"])
    heads = {key: 5 for key in table.sizes["head"]}
    with pytest.raises(TableError, match=r"12 does not split into '\(.*head .*' with .*head = 5"):
        fit(checkpoint, dict(checkpoint.shapes), **heads)
    layers = {key: 7 for keys in table.layers for key in keys if key != "inner_group_num"}
    with pytest.raises(TableError, match="has 7 layers, the weights have"):
        fit(checkpoint, dict(checkpoint.shapes), **layers)


BASES = {
    "BertModel": ["BertForPreTraining", "BertForQuestionAnswering", "BertForMultipleChoice"],
    "RobertaModel": ["RobertaForMaskedLM", "XLMRobertaForSequenceClassification"],
    "ElectraModel": ["ElectraForPreTraining", "ElectraForMaskedLM"],
    "DistilBertModel": ["DistilBertForSequenceClassification"],
    "AlbertModel": ["AlbertForPreTraining", "AlbertForTokenClassification"],
    "DebertaV2Model": ["DebertaV2ForMaskedLM", "DebertaV2ForSequenceClassification"],
    "DebertaModel": ["DebertaForMaskedLM"],
    "GPT2Model": ["GPT2LMHeadModel", "GPT2ForSequenceClassification"],
    "ViTModel": ["ViTForImageClassification"],
    "DeiTModel": ["DeiTForImageClassificationWithTeacher", "DeiTForImageClassification"],
}


@pytest.mark.parametrize(("base", "headed"), [(base, head) for base in BASES for head in BASES[base]])
def test_base_and_head_share_roles(base: str, headed: str, saved: Saved) -> None:
    """Without the prefix on disk, or with it: a role is the same, and so are its axes."""
    one, other = saved(base).signature.tensors, saved(headed).signature.tensors
    lacking = {role for role in one if role not in other}
    assert lacking <= {"pooler.dense.weight", "pooler.dense.bias", "pooler.weight", "pooler.bias"}
    assert all(entry.head for role, entry in other.items() if role not in one)
    assert all(one[role].axes == other[role].axes for role in one if role in other)


def respelled(names: Iterable[str], spellings: dict[str, str]) -> dict[str, str]:
    """New name -> name, by replacing parts of names."""
    found = {}
    for name in names:
        new = name
        for old, other in spellings.items():
            new = new.replace(old, other)
        found[new] = name
    return found


GAMMA = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@pytest.mark.parametrize(
    ("case", "spellings", "buffers"),
    [
        ("BertForPreTraining", GAMMA, ["bert.embeddings.position_ids"]),
        ("BertForPreTraining", {"bert.": ""}, ["embeddings.position_ids", "embeddings.token_type_ids"]),
        ("RobertaForMaskedLM", GAMMA, ["roberta.embeddings.position_ids"]),
        ("ElectraForMaskedLM", GAMMA, ["electra.embeddings.position_ids"]),
        ("DistilBertForMaskedLM", {"distilbert.": ""}, ["embeddings.position_ids"]),
        ("AlbertForPreTraining", GAMMA, ["albert.embeddings.position_ids"]),
        ("DebertaV2ForMaskedLM", GAMMA, ["deberta.embeddings.position_ids"]),
        ("DebertaForMaskedLM", GAMMA, ["deberta.embeddings.position_ids"]),
        ("GPT2LMHeadModel", {"transformer.": ""}, ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("ViTForImageClassification",
         {"encoder.layer.": "layers.", "attention.attention.query": "attention.q_proj",
          "attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj",
          "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
          "output.dense": "mlp.fc2"},
         []),
    ],
)  # fmt: skip
def test_other_spellings_are_the_same_tensors(
    case: str, spellings: dict[str, str], buffers: list[str], saved: Saved
) -> None:
    checkpoint = saved(case)
    names = respelled(checkpoint.shapes, spellings)
    assert set(names) != set(names.values())
    shapes = {new: checkpoint.shapes[old] for new, old in names.items()}
    found = fit(checkpoint, {**shapes, **dict.fromkeys(buffers, (1, 12))}).tensors
    usual = checkpoint.signature.tensors
    assert {role: names[entry.name] for role, entry in found.items()} == {r: e.name for r, e in usual.items()}
    assert {role: entry.axes for role, entry in found.items()} == {r: e.axes for r, e in usual.items()}


def test_two_spellings_of_one_tensor_are_refused(saved: Saved) -> None:
    checkpoint = saved("BertForPreTraining")
    twice = {**checkpoint.shapes, "bert.embeddings.LayerNorm.gamma": (12,)}
    with pytest.raises(TableError, match="spellings of one tensor"):
        fit(checkpoint, twice)


TIED = {
    "BertForPreTraining": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    "RobertaForMaskedLM": ("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
    "ElectraForMaskedLM": ("generator_lm_head.weight", "embeddings.word_embeddings.weight"),
    "DistilBertForMaskedLM": ("vocab_projector.weight", "embeddings.word_embeddings.weight"),
    "AlbertForMaskedLM": ("predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    "DebertaV2ForMaskedLM": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    "DebertaForMaskedLM": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    "GPT2LMHeadModel": ("lm_head.weight", "wte.weight"),
}


@pytest.mark.parametrize("case", TIED)
def test_a_tied_tensor_may_be_stored_twice(case: str, saved: Saved) -> None:
    """An alias takes the moves of the tensor that it repeats; untied, the two spaces are apart."""
    checkpoint = saved(case)
    head, source = TIED[case]
    assert head not in checkpoint.shapes
    shapes = {**checkpoint.shapes, head: checkpoint.signature.tensors[source].shape}
    for tied in (True, False):
        signature = fit(checkpoint, shapes, tie_word_embeddings=tied)
        entry = signature.tensors[head]
        (mine,), (theirs,) = (list(leaves(signature.tensors[role].axes[1])) for role in (head, source))
        roots = [signature.root[mine.space], signature.root[theirs.space]]
        assert entry.alias == (source if tied else None)
        assert (roots[0] == roots[1]) is (tied or case == "GPT2LMHeadModel")


def test_no_model_type_is_claimed_twice() -> None:
    types = [name for table in tables().values() for name in table.types]
    assert len(types) == len(set(types))


def test_a_known_type_is_found_without_reading_all_tables() -> None:
    for name, table in tables().items():
        assert all(table_for(kind).family == name for kind in table.types)
    families._shipped.cache_clear()
    table_for("gpt2")
    assert families._shipped.cache_info().currsize < len(tables()) / 4
