# SPDX-License-Identifier: Apache-2.0
"""Weighted sums whose weights differ from tensor to tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(tensors: Sequence[Tensor], weights: Sequence[float], normalize: bool = True) -> Tensor:
    """Return sum_i w_i T_i, over sum_i w_i where `normalize` (Model soups, Wortsman et al., 2022, Section 2).

    Summed in float32, or in float64 where the tensors are; returned in their dtype.

    Raises:
        ValueError: With `normalize`, the weights add up to 0.
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    total = torch.zeros_like(tensors[0], dtype=dtype)
    shares = torch.tensor(list(weights), dtype=dtype, device=total.device)
    for tensor, share in zip(tensors, shares, strict=True):
        total.addcmul_(tensor.to(dtype), share)
    if normalize:
        if float(shares.sum()) == 0:
            raise ValueError("the weights of a normalized sum add up to 0")
        total /= shares.sum()
    return total.to(tensors[0].dtype)
