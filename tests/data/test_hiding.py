# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from onebasin.data.batches import IGNORED, masked, padded
from onebasin.data.hiding import Hiding

MASK = 3
TEXTS = [[1, 10, 11, 12, 13, 2], [1, 14, 15, 10, 2], [1, 20, 2, 11]]  # 1, 2 and 20 are never hidden


def texts() -> list[dict[str, torch.Tensor]]:
    rows = masked([{"input_ids": text} for text in TEXTS * 20], MASK, 0.5, range(10, 16), torch.Generator())
    return [*padded(rows, 3)]


def whole(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def test_texts_stay_and_as_many_other_tokens_are_hidden() -> None:
    batches = texts()
    hiding = Hiding.of(batches)
    assert hiding is not None and hiding.mask == MASK and hiding.maskable.tolist() == [*range(10, 16)]
    seen = torch.zeros_like(batches[0]["input_ids"])
    generator = torch.Generator()
    for _ in range(100):
        anew = hiding.anew(batches[0], generator)
        assert torch.equal(whole(anew), whole(batches[0])) and anew.keys() == batches[0].keys()
        at = anew["labels"] != IGNORED
        assert (anew["input_ids"] == MASK).equal(at) and at.sum(-1).tolist() == [2, 2, 1]
        seen += at
    # Of four, three and one that may be hidden two, two and one are.
    expected = torch.tensor([[0, 50, 50, 50, 50, 0], [0, 67, 67, 67, 0, 0], [0, 0, 0, 100, 0, 0]])
    assert (seen - expected).abs().max() < 20 and (seen[expected == 0] == 0).all()


def test_what_is_no_masked_text_is_left_alone() -> None:
    ids = torch.arange(6).view(2, 3)
    assert Hiding.of([{"input_ids": ids, "labels": ids}]) is None  # a causal language model's
    assert Hiding.of([{"input_ids": ids, "labels": torch.tensor([0, 1])}]) is None
    assert Hiding.of([{"pixel_values": torch.zeros(2, 3)}]) is None
    assert Hiding.of([]) is None
