# SPDX-License-Identifier: Apache-2.0
"""Single examples without padding, and stacks of those with the same shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from onebasin.running.trace import Batch, examples_in


def unpadded(batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Yield the examples of a batch, each without its padding. Masks over several axes stay as they are.

    Raises ValueError for an example that is only padding, and for examples that have several rows of a tensor.
    """
    count = examples_in(batch)
    for name, tensor in batch.items():
        if len(tensor) != count:
            raise ValueError(f"'{name}' has {len(tensor)} rows for {count} examples, so these cannot be told apart")
    for row in range(count):
        example = {name: tensor[row] for name, tensor in batch.items()}
        mask = example.get("attention_mask")
        if mask is not None and not bool(mask.any()):
            raise ValueError("an example consists of padding alone; leave it out")
        if mask is not None and mask.dim() == 1:
            kept = mask.bool()
            del example["attention_mask"]
            for name in ("input_ids", "token_type_ids", "position_ids", "labels", "special_tokens_mask"):
                if name in example and example[name].shape == mask.shape:
                    example[name] = example[name][kept]
        yield example


def alike(examples: Sequence[dict[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield stacks of at most `size` examples of the same shapes, which need no mask."""

    def shape(example: dict[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(example.items()))

    for _, group in groupby(sorted(examples, key=shape), key=shape):
        members = list(group)
        for start in range(0, len(members), size):
            some = members[start : start + size]
            yield {name: torch.stack([example[name] for example in some]) for name in some[0]}
