# SPDX-License-Identifier: Apache-2.0
"""Dynamic masking: other tokens of a text are hidden in every round of training (Liu et al., 2019, section 4.1).

Training hides more tokens than evaluation: more predictions in a step outweigh that they are harder (Wettig et al.,
2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.running.trace import Batch

from .batches import IGNORED

MORE, MOST = 2, 0.4  # times as many tokens are hidden as before, up to this share of those that may be


@dataclass(frozen=True)
class Hiding:
    """How the tokens of texts were hidden, as far as the texts show it.

    mask: the token put in place of hidden ones. maskable: the tokens that are hidden anywhere, (tokens,) int64.
    """

    mask: int
    maskable: Tensor

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Hiding | None:
        """Infer it from batches. Returns None if they are not masked texts: labels do not all stand at the same
        token."""
        shown, hidden = list[Tensor](), list[Tensor]()
        for batch in batches:
            ids, labels = batch.get("input_ids"), batch.get("labels")
            if ids is None or labels is None or labels.shape != ids.shape:
                return None
            where = labels != IGNORED
            shown.append(ids[where])
            hidden.append(labels[where])
        masks = torch.unique(torch.cat(shown)) if shown else torch.empty(0)
        return cls(int(masks), torch.unique(torch.cat(hidden))) if len(masks) == 1 else None

    def anew(self, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the same texts with `MORE` times as many hidden tokens, drawn uniformly from those in `maskable`."""
        labels = batch["labels"]
        whole = torch.where(labels == IGNORED, batch["input_ids"], labels)
        free = torch.isin(whole, self.maskable)
        if "attention_mask" in batch:
            free &= batch["attention_mask"].bool()
        count = (labels != IGNORED).sum(-1, keepdim=True)
        count = count.maximum((MOST * free.sum(-1, keepdim=True)).long().minimum(MORE * count))
        drawn = torch.rand(whole.shape, generator=generator).masked_fill(~free, 2.0)  # the smallest are hidden
        hidden = drawn.argsort(-1).argsort(-1) < count
        return {
            **batch,
            "input_ids": whole.masked_fill(hidden, self.mask),
            "labels": whole.masked_fill(~hidden, IGNORED),
        }
