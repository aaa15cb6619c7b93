# SPDX-License-Identifier: Apache-2.0
"""Completeness: the signature generates every flat direction of a tiny model, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import build, save
from torch import Tensor
from transformers import PreTrainedModel

from onebasin.checkpoint.reader import Checkpoint
from onebasin.symmetry import Signature
from onebasin.symmetry.audit import Audit, audit

BERT = dict(vocab_size=7, max_position_embeddings=4, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=5, type_vocab_size=2, num_labels=3, layer_norm_eps=0.0, pad_token_id=None)  # fmt: skip
GPT2 = dict(vocab_size=7, n_positions=4, n_embd=6, n_layer=1, n_head=2, n_inner=5, layer_norm_epsilon=0.0, num_labels=3)
IMAGE = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
             intermediate_size=5, num_labels=3, layer_norm_eps=0.0)  # fmt: skip


def as_function(model: PreTrainedModel, tensors: dict[str, Tensor], rows: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """All outputs on `rows` random inputs, as a function of the tensors of the signature."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        c = model.config
        shape = (rows, c.num_channels, c.image_size, c.image_size)
        given: dict[str, Any] = {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
    else:
        given = {"input_ids": torch.randint(0, model.config.vocab_size, (rows, 4), generator=generator)}
        if model.config.model_type == "bert":
            given["token_type_ids"] = torch.randint(0, 2, (rows, 4), generator=generator)
    # A parameter's name in memory may differ from its name on disk; its random values tell which it is.
    memory = dict(model.named_parameters())
    names = {
        role: next(name for name, parameter in memory.items() if torch.equal(parameter, tensor))
        for role, tensor in tensors.items()
    }

    def outputs(tensors: dict[str, Tensor]) -> Tensor:
        values = {names[role]: tensor for role, tensor in tensors.items()}
        found = torch.func.functional_call(model, values, (), given, tie_weights=True)
        return torch.cat([value.reshape(-1) for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()])

    return outputs


def run(kind: str, folder: Path, rows: int, **config: Any) -> Audit:
    model = build(kind, **config, attn_implementation="sdpa").double()
    checkpoint = Checkpoint(save(model, folder))
    tensors = {role: checkpoint.read(role, torch.float64) for role in checkpoint.signature.tensors}
    return audit(checkpoint.signature, tensors, as_function(model, tensors, rows))


if __name__ == "__main__":
    import sys, tempfile
    transformers.logging.set_verbosity_error()
    for kind, rows, config in [
        ("GPT2LMHeadModel", 30, dict(GPT2, tie_word_embeddings=False)),
        ("GPT2LMHeadModel", 50, dict(GPT2, n_layer=2, tie_word_embeddings=False)),
        ("GPT2LMHeadModel", 30, GPT2),
        ("GPT2ForTokenClassification", 60, GPT2),
        ("GPT2Model", 30, GPT2),
        ("ViTForImageClassification", 300, IMAGE),
        ("ViTModel", 40, IMAGE),
        ("BertForMaskedLM", 40, BERT),
        ("BertForMaskedLM", 40, dict(BERT, tie_word_embeddings=False)),
        ("BertForTokenClassification", 80, BERT),
        ("BertForSequenceClassification", 300, BERT),
        ("BertForTokenClassification", 120, dict(BERT,num_hidden_layers=2)),
        ("BertForPreTraining", 40, BERT),
        ("BertModel", 40, BERT),
    ]:
        import time; t=time.time()
        with tempfile.TemporaryDirectory() as d:
            try: print(kind, config.get("tie_word_embeddings"), run(kind, Path(d), rows, **config), round(time.time()-t,1), flush=True)
            except Exception as e: print(kind, repr(e)[:300])
