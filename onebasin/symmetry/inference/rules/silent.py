# SPDX-License-Identifier: Apache-2.0
"""Operations that keep every number in its place, and those that only use shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..atoms import fix
from ..trace import KEY, Call, Trace
from .registry import RULES, rule


@rule(
    "to float double half bfloat16 type type_as contiguous clone detach .data dropout alpha_dropout cpu alias "
    "requires_grad_ __deepcopy__ dropout2d dropout1d feature_dropout _to_copy .real identity .grad_fn"
)
def same(trace: Trace, call: Call) -> Any:
    return as_it_was(trace, call, call.get(0, "input"))


def as_it_was(trace: Trace, call: Call, source: Any) -> Any:
    """Run a call whose output is one of its inputs, or a copy of it."""
    out = call.run()
    label = trace.label(source)
    if not isinstance(out, Tensor) or label is None or out is source:
        return out
    if label.indexes is not None and out.is_floating_point():
        fix(label.indexes, call.name)
    kept = None if out.is_floating_point() else label.indexes
    setattr(out, KEY, replace(label, axes=list(label.axes), indexes=kept))
    return out


@rule(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_tensor dim size numel stride is_floating_point is_complex data_ptr __len__ get_device element_size "
    "is_contiguous is_pinned .shape .device .dtype .ndim .is_cuda .requires_grad .layout .is_sparse .names "
    ".itemsize .is_nested .grad result_type broadcast_tensors_ __hash__ is_tensor __format__ __repr__ ndimension "
    "nelement is_same_size storage_offset untyped_storage register_hook .is_leaf .is_meta .is_mps .is_quantized "
    ".nbytes finfo is_autocast_enabled"
)
def blank(trace: Trace, call: Call) -> Any:
    return call.run()


SILENT = frozenset(name for name, function in RULES.items() if function in (same, blank))
