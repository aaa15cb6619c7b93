# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, the bulk of all work, by the library that is faster on a CPU.

`A @ B.T` calls MKL, the fastest on Intel's processors, which only uses AVX2 on all others. There, oneDNN, which torch
also contains, uses AVX-512 if available: up to twice the rate on a Zen 5 core, with rounding of the same order (both
sum in float32).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FROM = 1 << 18  # numbers in A, below which the choice does not matter
TALL = 2048  # rows of B, above which oneDNN takes over twice as long if B is stored by columns


def gemm(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return a b^T: (*batch, n, m) and (*batch, k, m) -> (*batch, n, k), the same bits for any number of threads.

    onto: (n, k), to which the product is added; its memory may be used for the result.
    """
    if not _by_onednn(a, b):
        return a @ b.mT if onto is None else onto.addmm_(a, b.mT)
    if len(b) > TALL:
        b = b.contiguous()
    # The operation that torch.compile uses for linear layers; its public counterpart copies all three matrices.
    linear = torch.ops.mkldnn._linear_pointwise
    found: Tensor = linear(a, b, None, "none", [], "") if onto is None else linear.binary(a, onto, b, None, "add")
    return found


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN computes the product: of two large matrices in float32 on a CPU, without gradients."""
    plain = all(one.dim() == 2 and one.dtype == torch.float32 and one.device.type == "cpu" for one in (a, b))
    return plain and a.numel() >= FROM and not (a.requires_grad or b.requires_grad) and _offered()


@cache
def _offered() -> bool:
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "GenuineIntel" not in _processor()


def _processor() -> str:
    """Return the system's description of its processors, which names their vendor."""
    described = Path("/proc/cpuinfo")
    return described.read_text("utf-8") if described.is_file() else platform.processor()
