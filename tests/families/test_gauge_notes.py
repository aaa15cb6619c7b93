# SPDX-License-Identifier: Apache-2.0
"""The notes `invisible`, `passes`, `into` and their kin say what the function does not see: moved, nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from rewritten import difference, outputs_of, read_all
from torch import Tensor

from onebasin.models.folder import Folder
from onebasin.symmetry import Entry, Signature
from onebasin.symmetry.gauge.dataflow import sharing
from onebasin.symmetry.gauge.rewrites import along_rows, differences
from onebasin.symmetry.tables.axes import Leaf, blocks, leaves, parse

Saved = Callable[[str], Folder]


def noted(signature: Signature, word: str) -> dict[str, Entry]:
    """Tensors with the note; on a weight it speaks of constants that the weight makes, not of its own numbers."""
    found = {role: entry for role, entry in signature.tensors.items() if word in entry.notes}
    spoken = word in ("invisible", "passes")
    return {role: entry for role, entry in found.items() if not (spoken and role.endswith("weight"))}


def block(signature: Signature, entry: Entry, tensor: Tensor, word: str) -> tuple[Tensor, str]:
    """The part of a bias that a note means, as a view, and the innermost space of it."""
    wanted = entry.notes[word]
    for view, inner in blocks(tensor, entry.axes, signature.sizes):
        name = inner[-1].space.split(".")[-1]
        if not wanted or parse(wanted)[0] == Leaf(name, inner[-1].dual):
            return view, inner[-1].space
    raise AssertionError(f"{entry.role} has no '{wanted}'")


def noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype)


def move_invisible(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """Key biases become noise."""
    biases = noted(signature, "invisible")
    for role, entry in biases.items():
        view, _ = block(signature, entry, tensors[role], "invisible")
        view += noise(view)
    return len(biases)


def move_passing(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """Value biases move into the output biases."""
    count = 0
    for role, entry in noted(signature, "passes").items():
        view, space = block(signature, entry, tensors[role], "passes")
        if not space.endswith("vo"):
            continue  # the bias of a norm, which moves only after the norm's weight has
        read = Leaf(space, dual=True)
        reader = next(other for other, found in signature.tensors.items() if read in signature.leaves(found))
        reads_first = read in leaves(signature.tensors[reader].axes[0])  # GPT-2: input axis first
        weight = tensors[reader] if reads_first else tensors[reader].T
        output = reader.removesuffix("weight") + "bias"
        if output not in tensors:
            continue  # no place for it
        shift = noise(view)
        view += shift
        shared = len(weight) // shift.numel()  # query heads that read the same values
        tensors[output] -= shift.unsqueeze(-2).expand(*shift.shape[:-1], shared, -1).flatten() @ weight
        count += 1
    return count


def move_constants(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """Constants move between summed tables, but not into one that a tied head reads as well."""
    tied = {entry.alias for entry in (*signature.tensors.values(), *signature.absent.values())}
    count = 0
    for role, entry in noted(signature, "into").items():
        targets = [other for other in entry.notes["into"].split()
                   if other in tensors and signature.tensors[other].axes[-1] == entry.axes[-1]]  # fmt: skip
        singles = [other for other in entry.notes.get("rows", "").split() if other in tensors]
        table = tensors[role].flatten(0, -2)  # a view: rows, stream
        if tied & {role, *targets, *singles}:
            continue
        for row, other in enumerate(singles):
            shift = noise(table[row])
            table[row] -= shift
            tensors[other] += shift
        shift = noise(table[0]) if targets else torch.zeros_like(table[0])
        table[len(singles) :] -= shift
        for other in targets:
            tensors[other] += shift
        count += 1
    return count


def move_shared(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """What a softmax runs over takes a constant; what two of them run over, two."""
    found = noted(signature, "softmax")
    for role in found:
        for rows in sharing(signature, role):
            tensors[role][rows] += noise(tensors[role][0])
    return len(found)


def move_unread(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """Rows that no position has become noise."""
    found = {role: entry.notes["unused"] for role, entry in noted(signature, "unused").items()}
    numbers = {role: int(word) for role, word in found.items() if word.isdigit()}
    for role, number in numbers.items():
        tensors[role][:number] = noise(tensors[role][:number])
    return len(numbers)


def move_unmet(signature: Signature, tensors: dict[str, Tensor]) -> int:
    """A vector that meets differences of rows alone takes noise across them."""
    found = noted(signature, "against")
    for role, entry in found.items():
        shift = noise(tensors[role])
        tensors[role] += shift - along_rows(shift, differences(tensors[entry.notes["against"]]))
    return len(found)


MOVES = {"invisible": move_invisible, "passes": move_passing, "into": move_constants, "softmax": move_shared,
         "unused": move_unread, "against": move_unmet}  # fmt: skip


# Families that write without biases, and a DeBERTa in which nothing passes: there is nothing to move.
BARE = ("DebertaForTokenClassification-talking", "Llama", "Mistral", "Qwen", "Phi3", "Gemma", "Olmo", "GPTJ", "Falcon",
        "GPTNeoXForCausalLM-no-bias", "GPTNeoXForCausalLM-serial-no-bias",
        "Starcoder2ForCausalLM-no-bias", "OPTForCausalLM-gelu-no-bias",
        "StableLm", "Cohere", "Mpt", "Mixtral", "T5", "MT5", "ModernBert", "SwinForImageClassification-no-bias",
        "DeepseekV")  # fmt: skip


@pytest.mark.parametrize("case", zoo.CASES)
def test_what_the_notes_call_free_is_free(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    tensors = read_all(checkpoint)
    moved = {role: value.clone() for role, value in tensors.items()}
    counts = [move(checkpoint.signature, moved) for move in MOVES.values()]
    assert any(counts) or case.startswith(BARE)
    assert difference(outputs_of(checkpoint, tensors), outputs_of(checkpoint, moved)) < 1e-9


@pytest.mark.parametrize(
    ("case", "word", "count"),
    [
        ("BertForTokenClassification", "invisible", 2),
        ("BertForTokenClassification", "passes", 2),
        ("BertForTokenClassification", "into", 2),
        ("BertLMHeadModel-cross", "invisible", 4),
        ("BertLMHeadModel-cross", "passes", 4),
        ("BertForMaskedLM", "into", 0),
        ("GPT2LMHeadModel-cross", "invisible", 4),
        ("GPT2LMHeadModel-untied", "into", 1),
        ("ViTForImageClassification", "invisible", 2),
        ("AlbertForMaskedLM", "passes", 1),
        ("DebertaV2ForTokenClassification", "invisible", 0),
        ("DebertaV2ForTokenClassification", "passes", 2),
        ("DebertaV2ForTokenClassification-c2p", "invisible", 2),
        ("DebertaV2ForTokenClassification-own-keys", "invisible", 2),
        ("DebertaForTokenClassification", "passes", 2),
        ("DebertaForTokenClassification-talking", "passes", 0),
        ("LlamaForCausalLM-biases", "passes", 2),
        ("LlamaForCausalLM-biases", "invisible", 0),  # rotary embeddings turn a key bias: it is seen
        ("Qwen2ForCausalLM", "passes", 0),
    ],
)
def test_the_notes_are_where_they_belong(case: str, word: str, count: int, saved: Saved) -> None:
    checkpoint = saved(case)
    tensors = {role: value.clone() for role, value in read_all(checkpoint).items()}
    assert MOVES[word](checkpoint.signature, tensors) == count


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("DebertaV2ForTokenClassification", "encoder.layer.0.attention.self.key_proj.bias"),
        ("DebertaV2ForTokenClassification-own-keys", "encoder.layer.0.attention.self.key_proj.bias"),
        ("DebertaV2ForTokenClassification-own-keys", "encoder.layer.0.attention.self.pos_query_proj.bias"),
        ("DebertaForTokenClassification", "encoder.layer.0.attention.self.pos_q_proj.bias"),
        ("BertForTokenClassification", "encoder.layer.0.attention.self.query.bias"),
    ],
)
def test_what_they_leave_out_is_seen(case: str, tensor: str, saved: Saved) -> None:
    """Relative positions make a key bias visible, since keys meet position queries."""
    checkpoint = saved(case)
    before = read_all(checkpoint)
    assert "invisible" not in checkpoint.signature.tensors[tensor].notes
    after = {**before, tensor: before[tensor] + noise(before[tensor])}
    assert difference(outputs_of(checkpoint, before), outputs_of(checkpoint, after)) > 1e-4


@pytest.mark.parametrize(
    ("case", "role", "notes"),
    [
        ("GPTJForCausalLM", "h.0.attn.v_proj.weight", {"passes": "vo"}),
        ("GPTJForCausalLM", "h.0.attn.k_proj.weight", {"invisible": "nope'"}),
        ("XLNetModel", "layer.0.rel_attn.v.weight", {"passes": "vo"}),
        ("XLNetModel", "layer.0.rel_attn.k.weight", {"invisible": "qk'"}),
        ("WhisperModel", "encoder.layers.0.self_attn.k_proj.weight", {"invisible": "qk'"}),
    ],
)
def test_maps_without_biases_are_noted_for_the_constants_that_they_make(
    case: str, role: str, notes: dict[str, str], saved: Saved
) -> None:
    """A norm's bias makes constants in all that reads it, which the audit counts."""
    assert saved(case).signature.tensors[role].notes == notes
