# SPDX-License-Identifier: Apache-2.0
"""What is measured: one row per job. Adding a row is adding a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.engine import in_order
from onebasin.matching import Run, match_weights
from onebasin.symmetry import Group, Signature, acting_groups
from onebasin.symmetry.gauge.canonical import canonical

from . import transcription
from .models import Pair, pair

Read = Callable[[str], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """One job. layers: how many of the model's (None: all), which stand for any
    depth. faster, over_floor: its targets, if any."""

    name: str
    model: str
    kind: str = "independent"
    level: str = "paper"
    parts: tuple[str, ...] | None = None
    rescale: str = "none"
    layers: int | None = None
    faster: float | None = None
    over_floor: float | None = 1.3

    @property
    def plain(self) -> bool:
        """Whether the transcription is timed, too: it has no other level, and at 11,008 neurons it takes minutes."""
        return self.level == "paper" and self.model != "llama-7b"

    def groups(self, signature: Signature) -> dict[str, Group]:
        return acting_groups(signature, self.level, rescale=self.rescale, parts=self.parts)

    def pair(self) -> Pair:
        return pair(self.model, self.kind, self.layers)


_ATTENTION = Row("attention", "deberta-v3-large", parts=("attention",), faster=2.5)
_PAPER = Row("paper", "deberta-v3-large", parts=("attention", "ffn"), layers=2, faster=1.7)
_FULL = Row("full", "roberta-base", kind="fine-tuned", level="full", over_floor=1.7)
ROWS = [
    _ATTENTION,
    replace(_ATTENTION, name="attention, after", rescale="after", faster=8.0),
    replace(_ATTENTION, name="attention, joint", rescale="joint", faster=8.0, over_floor=None),
    replace(_ATTENTION, name="attention, fine-tuned", kind="fine-tuned"),
    replace(_ATTENTION, name="attention, base", model="roberta-base"),
    _PAPER,
    replace(_PAPER, name="paper, fine-tuned", kind="fine-tuned"),
    replace(_PAPER, name="paper, base", model="roberta-base"),
    replace(_PAPER, name="paper, ViT", model="vit-base"),
    replace(_PAPER, name="paper, Llama", model="llama-7b", layers=3, faster=None),
    _FULL,
    replace(_FULL, name="full, large", model="deberta-v3-large", layers=4),
    replace(_FULL, name="full, ViT", model="vit-base"),
]
_QUICK = ("attention", "attention, after", "paper", "full")
QUICK = [replace(row, model="tiny", layers=None, faster=None, over_floor=None) for row in ROWS if row.name in _QUICK]


def touched(signature: Signature, groups: Mapping[str, Group]) -> list[str]:
    """Roles that some active space touches: what a row reads and rewrites."""
    active = {role for root in groups for role in signature.touching[root]}
    return [role for role in signature.tensors if role in active]


def prepared(row: Row) -> tuple[Signature, dict[str, tuple[Tensor, Tensor]]]:
    """The signature and the pair in memory, in canonical form where the level rotates the stream."""
    made = row.pair()
    signature = made.signature
    if row.level == "paper":
        return signature, {role: made.read(role) for role in touched(signature, row.groups(signature))}
    anchor = canonical(signature, {role: made.anchor(role) for role in signature.tensors})
    source = canonical(signature, {role: made.source(role) for role in signature.tensors})
    return source.signature, {role: (anchor.tensors[role], source.tensors[role]) for role in source.signature.tensors}


def ours(row: Row, signature: Signature, read: Read) -> Iterator[dict[str, Tensor]]:
    """The matched tensors by role: the alignment, then every tensor that it moves, one thread for a layer or tensor."""
    groups, workers = row.groups(signature), torch.get_num_threads()
    roles = touched(signature, groups)
    alignment = match_weights(signature, read, groups, roles=roles, run=Run(workers, measure=False)).alignment

    def moved(role: str) -> dict[str, Tensor]:
        return {role: alignment.apply(signature, role, read(role)[1])}

    yield from in_order(moved, roles, workers)


def plain(row: Row, signature: Signature, read: Read) -> Iterator[dict[str, Tensor]]:
    """The same by the transcription. A joint optimum is not in the paper: it rescales afterwards."""
    assert row.parts is not None
    return transcription.match(signature, read, row.parts, row.rescale != "none")
