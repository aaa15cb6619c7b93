# SPDX-License-Identifier: Apache-2.0
"""Softmax, and attention: two contractions with a softmax between them."""

from __future__ import annotations

import string
from typing import Any

from torch import Tensor

from ..atoms import PERMUTE, lower
from ..trace import Call, Trace
from .constants import entrywise
from .contractions import contract
from .registry import rule


@rule("softmax log_softmax _softmax")
def softmax(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    label = trace.label(source)
    axes = trace.axes(source, "softmax")
    lower(axes, PERMUTE, "softmax")
    dim = call.get(1, "dim", -1)
    out = call.run()
    place = (dim if dim is not None else -1) % source.dim()
    if label is not None and place == source.dim() - 1:
        trace.softmaxed |= set(label.by)
    if label is not None:
        beside = [axis.top for d, axis in enumerate(axes) if axis is not None and d != place]
        trace.softmaxed |= {name for name, axis in label.biases if axis.top in beside}
    trace.mixed([a for d, a in enumerate(axes) if d != place], [axes[place]])
    trace.put(out, axes, source)
    return out


@rule("scaled_dot_product_attention")
def attention(trace: Trace, call: Call) -> Any:
    q, k, v = (call.get(i, word) for i, word in enumerate(("query", "key", "value")))
    mask = call.get(3, "attn_mask")
    out = call.run()
    outer = string.ascii_lowercase[: q.dim() - 2]
    logits = q.new_empty((*q.shape[:-1], k.shape[-2]))
    if q.shape[:-2] != k.shape[:-2]:
        return trace.unruled(call.ran(out))
    scores = contract(trace, f"{outer}SX,{outer}TX->{outer}ST", [q, k], logits, "attention")
    if isinstance(mask, Tensor):
        scores = entrywise(logits, mask, scores, trace.axes(mask), logits, "attention mask", sums=False)
    trace.put(logits, scores, q, k)
    lower(scores, PERMUTE, "softmax")
    axes = contract(trace, f"{outer}ST,{outer}TX->{outer}SX", [logits, v], out, "attention")
    if axes[-1] is not None:
        trace.passes.append((axes[-1], "passes"))
    return trace.put(out, axes, q, k, v)
