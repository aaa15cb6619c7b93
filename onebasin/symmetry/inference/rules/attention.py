# SPDX-License-Identifier: Apache-2.0
"""Softmax, and attention: two contractions with a softmax between them."""

from __future__ import annotations

import inspect
import string
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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


@rule("multi_head_attention_forward")
def fused(trace: Trace, call: Call) -> Any:
    """Apply the rules of the projections, in one matrix or in three, of attention, and of the output projection."""
    given = inspect.signature(functional.multi_head_attention_forward).bind(*call.args, **call.kwargs).arguments
    query, mask, padding = given["query"], given.get("attn_mask"), given.get("key_padding_mask")
    rest = any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    logical = mask is not None and not mask.is_floating_point()
    if query.dim() != 3 or given.get("add_zero_attn") or rest or logical:
        return trace.unruled(call)
    _, weights = call.run()
    with trace:
        if given.get("use_separate_proj_weight"):
            rows = [given[f"{name}_proj_weight"] for name in "qkv"]
        else:
            rows = given["in_proj_weight"].chunk(3)
        bias = given["in_proj_bias"]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        made = [functional.linear(given[name], w, b)
                for name, w, b in zip(("query", "key", "value"), rows, biases, strict=True)]  # fmt: skip
        q, k, v = [each.view(*each.shape[:2], given["num_heads"], -1).permute(1, 2, 0, 3) for each in made]
        if mask is not None and mask.dim() == 3:  # (batch heads) queries keys
            mask = mask.view(*q.shape[:2], *mask.shape[1:])
        if padding is not None:  # batch keys
            hidden = torch.zeros(padding.shape, dtype=q.dtype).masked_fill(padding.bool(), -inf)[:, None, None]
            mask = hidden if mask is None else mask + hidden
        joined = functional.scaled_dot_product_attention(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
        return functional.linear(joined, given["out_proj_weight"], given["out_proj_bias"]), weights
