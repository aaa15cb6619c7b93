# SPDX-License-Identifier: Apache-2.0
"""Completeness: the signature generates every flat direction of a tiny model, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, save
from torch import Tensor
from transformers import PreTrainedModel

from onebasin.checkpoint.reader import Checkpoint
from onebasin.symmetry import Signature
from onebasin.symmetry.audit import audit

Function = Callable[[dict[str, Tensor]], Tensor]

# No epsilon in the norms, and no padding token, whose row of the token table takes no gradient.
BERT = dict(
    vocab_size=7, max_position_embeddings=4, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=5, type_vocab_size=2, num_labels=3, layer_norm_eps=0.0, pad_token_id=None,
)  # fmt: skip
GPT2 = dict(
    vocab_size=7, n_positions=4, n_embd=6, n_layer=1, n_head=2, n_inner=5, layer_norm_epsilon=0.0, num_labels=3
)
DISTIL = dict(
    vocab_size=7, max_position_embeddings=4, dim=6, n_layers=1, n_heads=2, hidden_dim=5, pad_token_id=None
)
IMAGE = dict(
    image_size=4, patch_size=2, num_channels=1, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=5, num_labels=3, layer_norm_eps=0.0,
)  # fmt: skip
UNTIED = dict(tie_word_embeddings=False)

# With one layer a ViT's class token asks the same question of every image, which leaves its query unused.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt2 tied": ("GPT2LMHeadModel", 30, GPT2),
    "gpt2 tokens": ("GPT2ForTokenClassification", 60, GPT2),
    "gpt2 headless": ("GPT2Model", 30, GPT2),
    "vit": ("ViTForImageClassification", 300, dict(IMAGE, num_hidden_layers=2)),
    "vit headless": ("ViTModel", 40, IMAGE),
    "bert tied": ("BertForMaskedLM", 40, BERT),
    "bert untied": ("BertForMaskedLM", 40, dict(BERT, **UNTIED)),
    "bert all heads": ("BertForPreTraining", 40, BERT),
    "bert tokens, two layers": ("BertForTokenClassification", 80, dict(BERT, num_hidden_layers=2)),
    "bert sequence": ("BertForSequenceClassification", 300, BERT),
    "bert headless": ("BertModel", 40, BERT),
    "distilbert": ("DistilBertForMaskedLM", 60, DISTIL),
}


def read(model: PreTrainedModel, folder: Path) -> tuple[Signature, dict[str, Tensor]]:
    checkpoint = Checkpoint(save(model, folder))
    tensors = {role: checkpoint.read(role, torch.float64) for role in checkpoint.signature.tensors}
    return checkpoint.signature, tensors


def as_function(model: PreTrainedModel, tensors: dict[str, Tensor], rows: int) -> Function:
    """All outputs on `rows` random inputs, as a function of the tensors by role."""
    generator, config = torch.Generator().manual_seed(1), model.config
    if model.main_input_name == "pixel_values":
        shape = (rows, config.num_channels, config.image_size, config.image_size)
        given = {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
    else:
        given = {"input_ids": torch.randint(0, config.vocab_size, (rows, 4), generator=generator)}
        if config.model_type == "bert":
            given["token_type_ids"] = torch.randint(0, 2, (rows, 4), generator=generator)
    # A parameter's name in memory may differ from that on disk; its random values tell which it is.
    memory = dict(model.named_parameters())
    names = {
        role: next(name for name, parameter in memory.items() if torch.equal(parameter, tensor))
        for role, tensor in tensors.items()
    }

    def outputs(moved: dict[str, Tensor]) -> Tensor:
        values = {names[role]: tensor for role, tensor in moved.items()}
        found = torch.func.functional_call(model, values, (), given, tie_weights=True)
        kept = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
        return torch.cat([value.reshape(-1) for value in kept])

    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_every_flat_direction_is_generated(name: str, tmp_path: Path) -> None:
    kind, rows, config = MODELS[name]
    model = build(kind, **config).double()
    signature, tensors = read(model, tmp_path)
    found = audit(signature, tensors, as_function(model, tensors, rows))
    assert found.largest_change < 1e-10
    assert found.gap[0] > 1e-8 and found.gap[1] < 1e-12  # the rank is beyond doubt
    assert found.dimension == found.nullity
    assert found.complete


@pytest.mark.parametrize(
    ("layers", "rows", "parameters", "rank", "nullity"), [(1, 30, 383, 236, 147), (2, 50, 646, 391, 255)]
)
def test_untied_gpt2_has_the_known_numbers(
    layers: int, rows: int, parameters: int, rank: int, nullity: int, tmp_path: Path
) -> None:
    model = build("GPT2LMHeadModel", **dict(GPT2, n_layer=layers), **UNTIED).double()
    signature, tensors = read(model, tmp_path)
    found = audit(signature, tensors, as_function(model, tensors, rows))
    assert (found.parameters, found.rank, found.nullity) == (parameters, rank, nullity)
    assert found.dimension == nullity


def test_a_wrong_symmetry_changes_outputs(tmp_path: Path) -> None:
    """A query bias that the table calls invisible is found out."""
    model = build("BertForTokenClassification", **BERT).double()
    signature, tensors = read(model, tmp_path)
    query = "encoder.layer.0.attention.self.query.bias"
    signature.tensors[query].notes["invisible"] = ""  # type: ignore[index]
    found = audit(signature, tensors, as_function(model, tensors, 80))
    assert found.largest_change > 1e-4 and not found.complete
    del signature.tensors[query].notes["invisible"]  # type: ignore[attr-defined]


def test_a_missing_symmetry_leaves_a_difference(tmp_path: Path) -> None:
    """Heads whose inner bases the signature holds fixed: 2 heads of gl(3) twice are missing."""
    model = build("GPT2LMHeadModel", **GPT2, **UNTIED).double()
    signature, tensors = read(model, tmp_path)
    spaces = {key: space for key, space in signature.spaces.items()}
    for key in ("h.0.qk", "h.0.vo"):
        spaces[key] = type(spaces[key])(**{**vars(spaces[key]), "kind": "fixed"})
    poorer = Signature(signature.family, signature.tensors, spaces, signature.root, signature.absent)
    found = audit(poorer, tensors, as_function(model, tensors, 30))
    assert found.nullity - found.dimension == 2 * 2 * 9 and not found.complete


def test_too_few_outputs_and_zero_norms_are_refused(tmp_path: Path) -> None:
    model = build("GPT2LMHeadModel", **GPT2).double()
    signature, tensors = read(model, tmp_path)
    with pytest.raises(ValueError, match="give more inputs"):
        audit(signature, tensors, as_function(model, tensors, 2))
    function = as_function(model, tensors, 30)
    tensors["ln_f.weight"][2] = 0
    with pytest.raises(ValueError, match=r"ln_f\.weight"):
        audit(signature, tensors, function)
