# SPDX-License-Identifier: Apache-2.0
"""Running models in float64 throughout: the one place that takes away the casts to float32 of their classes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Keep float64 tensors in float64 where a model would turn them into float32 (in norms, rotary tables, softmaxes).

    Such casts are there to raise the precision of 16 bits, and `transformers` makes them whatever the dtype. A batch
    norm is written out, since torch has no derivative by its running statistics.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func is torch.einsum:  # XLNet's positions are float32
            args = (args[0], *(arg.double() for arg in args[1:]))
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func in (Tensor.to, Tensor.type):
                args = (args[0], *(torch.float64 if arg is torch.float32 else arg for arg in args[1:]))
        return func(*args, **kwargs)


def throughout(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return `Float64()` for a model of that dtype, and a context that changes nothing for all others."""
    return Float64() if dtype == torch.float64 else nullcontext()


def _batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, **_: object
) -> Tensor:
    """(batch, channels, ...) -> the same, as evaluation has it."""
    scale = weight / (variance + eps).sqrt()
    shape = (1, -1, *[1] * (x.dim() - 2))
    return x * scale.view(shape) + (bias - mean * scale).view(shape)
