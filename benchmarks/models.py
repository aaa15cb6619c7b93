# SPDX-License-Identifier: Apache-2.0
"""Pairs of models at published sizes: shapes from a model on the meta device, numbers from seeds, by role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from onebasin.families import table_for
from onebasin.symmetry import Alignment, Signature, acting_groups, resolve

STD = 0.02  # of every weight, as BERT is initialised
NOISE = 0.1  # of a fine-tuned model around its anchor, in units of STD

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "bert-base": ("bert", {}),
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "vit-base": ("vit", {}),
    "deberta-v3-large": (
        "deberta-v2",
        dict(vocab_size=128100, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
             intermediate_size=4096, type_vocab_size=0, relative_attention=True, position_buckets=256,
             pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm",
             position_biased_input=False),
    ),
    "llama-7b": (
        "llama",
        dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=8,
             num_hidden_layers=32, vocab_size=32000),
    ),
    "tiny": ("bert", dict(vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                          intermediate_size=1024)),
}  # fmt: skip


@cache
def signature_of(model: str, layers: int | None = None) -> Signature:
    """The signature of a model of `MODELS`, cut to its first `layers` layers; allocates no weights."""
    model_type, given = MODELS[model]
    config = AutoConfig.for_model(model_type, **given)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        tensors = AutoModel.from_config(config).state_dict()  # type: ignore[no-untyped-call]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return resolve(table_for(model_type), shapes, config.to_dict())


@dataclass(frozen=True)
class Pair:
    """Anchor and source, made anew at every read, so that a pair takes no memory of its own.

    independent: two draws from one distribution. fine-tuned: the source is the anchor with noise, every head
    rotated and every FFN's neurons permuted by a planted element.
    """

    signature: Signature
    kind: str  # independent | fine-tuned
    planted: Alignment

    def anchor(self, role: str) -> Tensor:
        return self._draw(role, "anchor")

    def source(self, role: str) -> Tensor:
        if self.kind == "independent":
            return self._draw(role, "source")
        noise = STD * NOISE * torch.randn(self.signature.tensors[role].shape, generator=_generator(role, "noise"))
        return self.planted.apply(self.signature, role, self._draw(role, "anchor") + noise)

    def read(self, role: str) -> tuple[Tensor, Tensor]:
        return self.anchor(role), self.source(role)

    def _draw(self, role: str, which: str) -> Tensor:
        entry = self.signature.tensors[role]
        values = STD * torch.randn(entry.shape, generator=_generator(role, which))
        return values if entry.norm is None else values + entry.norm.unit


def pair(model: str, kind: str, layers: int | None = None) -> Pair:
    """A pair of `model`; kind: independent or fine-tuned."""
    signature = signature_of(model, layers)
    elements, batch = {}, {}
    for root, group in acting_groups(signature, "paper").items():
        space = signature.spaces[root]
        sizes = tuple(signature.spaces[outer].size for outer in space.batch)
        elements[root], batch[root] = (
            group.random(space.size, sizes, _generator(root, "planted")),
            space.batch,
        )
    return Pair(signature, kind, Alignment(elements, batch))


def loaded(pair: Pair, roles: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Anchor and source of every role, in memory."""
    return {role: pair.read(role) for role in roles}


def _generator(*words: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32("/".join(words).encode()))
