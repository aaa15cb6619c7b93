# SPDX-License-Identifier: Apache-2.0
"""Large products, the bulk of matching's work, by whichever library is faster on a CPU.

`A @ S.T` is MKL's, which keeps to AVX2 on processors that are not Intel's. oneDNN, which torch holds too, uses AVX-512
wherever it is: twice the rate on a Zen 5 core, with rounding of the same order (both sum in float32).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FROM = 1 << 20  # numbers in A; a layout of oneDNN's own has to pay


def product(anchor: Tensor, source: Tensor) -> Tensor:
    """A S^T: (*batch, n, m) and (*batch, k, m) -> (*batch, n, k). The same bits for any number of threads."""
    if not by_onednn(anchor):
        return anchor @ source.mT
    found: Tensor = functional.linear(anchor.to_mkldnn(), source).to_dense()
    return found


def by_onednn(anchor: Tensor) -> bool:
    """Whether oneDNN forms the products of this matrix."""
    plain = anchor.dim() == 2 and anchor.dtype == torch.float32 and anchor.device.type == "cpu"
    return plain and anchor.numel() >= FROM and not anchor.requires_grad and _offered()


def _offered() -> bool:
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return onednn and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
