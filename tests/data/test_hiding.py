# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from onebasin.data.batches import IGNORED, masked, padded
from onebasin.data.hiding import Hiding

MASK = 3
TEXTS = [[1, *range(10, 20), 2], [1, 14, 15, 10, 2], [1, 20, 2, 11]]  # 1, 2 and 20 are never hidden


def texts(share: float) -> list[dict[str, torch.Tensor]]:
    rows = masked([{"input_ids": text} for text in TEXTS * 20], MASK, share, range(10, 20), torch.Generator())
    return [*padded(rows, 3)]


def whole(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


@pytest.mark.parametrize(("share", "counts"), [(0.2, [4, 1, 1]), (0.3, [4, 1, 1]), (0.5, [5, 2, 1])])
def test_texts_stay_and_more_of_their_tokens_are_hidden(share: float, counts: list[int]) -> None:
    """Twice as many, up to four tenths, and never fewer than before."""
    batches = texts(share)
    hiding = Hiding.of(batches)
    assert hiding is not None and hiding.mask == MASK and hiding.maskable.tolist() == [*range(10, 20)]
    seen = torch.zeros_like(batches[0]["input_ids"])
    generator = torch.Generator()
    for _ in range(100):
        anew = hiding.anew(batches[0], generator)
        assert torch.equal(whole(anew), whole(batches[0])) and anew.keys() == batches[0].keys()
        at = anew["labels"] != IGNORED
        assert (anew["input_ids"] == MASK).equal(at) and at.sum(-1).tolist() == counts
        seen += at
    may = torch.isin(whole(batches[0]), hiding.maskable) & batches[0]["attention_mask"].bool()
    expected = may * 100 * torch.tensor(counts)[:, None] / torch.tensor([10, 3, 1])[:, None]
    assert (seen - expected).abs().max() < 20 and not seen[~may].any()


def test_what_is_no_masked_text_is_left_alone() -> None:
    ids = torch.arange(6).view(2, 3)
    assert Hiding.of([{"input_ids": ids, "labels": ids}]) is None  # a causal language model's
    assert Hiding.of([{"input_ids": ids, "labels": torch.tensor([0, 1])}]) is None
    assert Hiding.of([{"pixel_values": torch.zeros(2, 3)}]) is None
    assert Hiding.of([]) is None
