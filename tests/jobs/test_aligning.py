# SPDX-License-Identifier: Apache-2.0
"""What learned matching starts from: activations on some of the data."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from onebasin.jobs.aligning import spread_over


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 7), (40, 8), (100, 16), (129, 32), (500, 64)])
def test_enough_examples_from_all_over(count: int, size: int) -> None:
    batches = [{"input_ids": torch.full((size, 2), number)} for number in range(count)]
    kept = spread_over(batches, 640)
    found = len(kept) * size
    assert found >= min(640, count * size)
    assert found < 2 * 640 + size
    places = [int(batch["input_ids"][0, 0]) for batch in kept]
    assert len({b - a for a, b in pairwise(places)}) <= 1  # equally far apart
    assert not count or count - places[-1] <= max(1, len(batches) * size // 640)  # up to the end
