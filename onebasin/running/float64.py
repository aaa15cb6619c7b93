# SPDX-License-Identifier: Apache-2.0
"""Running models in float64 throughout, without the casts to float32 in their classes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.linspace, torch.eye}


class OnlyFloat64(TorchFunctionMode):
    """Compute everything in float64 that a model would compute in less: norms, rotary tables, softmaxes, masks.

    `transformers` casts to float32 to raise the precision of 16 bits, but does so for every dtype, and only float64
    tells exactness from rounding. A batch norm is written out, since torch has no derivative with respect to its
    running statistics.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.nn.functional.batch_norm and args[1] is not None and not kwargs.get("training"):
            return _batch_norm(*args, **kwargs)
        if func in _CASTS:
            return args[0].to(torch.float64)
        if func is Tensor.mul and type(args[1]) is float and not (args[0].is_floating_point() or args[0].is_complex()):
            args = (args[0].to(torch.float64), args[1])  # a mask times the least float64, which float32 does not have
        fills = func is torch.full and isinstance(kwargs["fill_value"] if "fill_value" in kwargs else args[1], float)
        if (fills or func in _FACTORIES) and kwargs.get("dtype") is None and torch.get_default_dtype() in _WIDER:
            kwargs["dtype"] = torch.float64
        if kwargs.get("dtype") in _WIDER:
            kwargs["dtype"] = _WIDER[kwargs["dtype"]]
        if torch.dtype in map(type, args):
            args = tuple(_WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and found.dtype in _WIDER and type(found) is Tensor:
            return found.to(_WIDER[found.dtype])  # tables that are computed in the forward pass
        return found


def throughout(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return `OnlyFloat64()` for a model of that dtype, else a context that changes nothing."""
    return OnlyFloat64() if dtype == torch.float64 else nullcontext()


def _batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, **_: object
) -> Tensor:
    """(batch, channels, ...) -> the same shape, as in evaluation mode."""
    scale = weight / (variance + eps).sqrt()
    shape = (1, -1, *[1] * (x.dim() - 2))
    return x * scale.view(shape) + (bias - mean * scale).view(shape)
