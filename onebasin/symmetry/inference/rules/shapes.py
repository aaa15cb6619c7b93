# SPDX-License-Identifier: Apache-2.0
"""Views, transposes, slices and repeats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..trace import Call, Trace
from .indexing import by_index
from .places import moved
from .registry import rule


@rule(
    "view reshape flatten unflatten transpose permute movedim moveaxis swapaxes swapdims .T .mT .H t adjoint squeeze "
    "unsqueeze __getitem__ select narrow chunk split unbind expand expand_as broadcast_to repeat "
    "repeat_interleave tile roll flip view_as reshape_as ravel tensor_split split_with_sizes unfold diagonal "
    "__iter__ index_select unsafe_chunk unsafe_split hsplit vsplit dsplit rot90 masked_select take_along_dim "
    "gather broadcast_tensors slice_scatter_ pixel_shuffle pixel_unshuffle channel_shuffle atleast_1d atleast_2d "
    "atleast_3d squeeze_ unsqueeze_ transpose_ t_ swapaxes_ resize_ as_strided"
)
def rearranged(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input", call.kwargs.get("self"))
    if call.name == "broadcast_tensors":
        source = call.args[0]
    label = trace.label(source)
    if call.name in ("__getitem__", "index_select", "gather", "take_along_dim"):
        chosen = by_index(trace, call)
        if chosen is not NotImplemented:
            return chosen
    if label is None and call.name in ("expand_as", "view_as", "reshape_as"):  # only the other's shape matters
        return call.run()
    if label is None or call.name == "broadcast_tensors":
        return trace.unruled(call)
    where = torch.arange(source.numel()).view(source.shape)
    after = _patches(trace, call, where) if call.func is functional.unfold else call.on({id(source): where})
    out = call.run()
    if isinstance(out, Tensor):
        moved(trace, source, out, after, call, where)
    else:
        out = tuple(out)
        for one, place in zip(out, after, strict=True):
            moved(trace, source, one, place, call, where)
    return out


def _patches(trace: Trace, call: Call, where: Tensor) -> Tensor:
    """Return the places of the numbers in patches of images; zeros beside these count as the nearest number in the same
    channel, which moves as they do."""
    kernel, dilation, padding, stride = (
        call.get(place, word, default)
        for place, (word, default) in enumerate(
            (("kernel_size", None), ("dilation", 1), ("padding", 0), ("stride", 1)), start=1
        )
    )
    high, wide = (padding, padding) if isinstance(padding, int) else padding
    if high or wide:
        channels = trace.axes(call.get(0, "input"))[1]
        trace.padded += [channels] if channels is not None else []
    padded = functional.pad(where.double(), (wide, wide, high, high), mode="replicate")
    return functional.unfold(padded, kernel, dilation, 0, stride).long()
