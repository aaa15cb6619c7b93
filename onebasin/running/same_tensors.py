# SPDX-License-Identifier: Apache-2.0
"""Comparing the weights of two model folders, tensor by tensor, so that neither has to fit in memory."""

from __future__ import annotations

from math import inf

import torch

from onebasin.engine import Means, in_order
from onebasin.models.errors import ModelError
from onebasin.models.folder import Folder
from onebasin.running.verification import Verification
from onebasin.symmetry import Alignment
from onebasin.symmetry.exactness import departure

MAPPED = 1e-5  # largest difference due to rounding where tensors were multiplied by maps in float32


def compare_tensors(
    a: Folder,
    b: Folder,
    alignment: Alignment | None = None,
    means: Means | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Compare the tensors of `b` with those of `a`, rewritten by `alignment`.

    Args:
        a: The original.
        b: Its copy.
        alignment: Maps that do not change the function (default: none), so that equal tensors imply equal functions.
        means: The type and device of the comparison, and how many tensors are compared at a time.
        tolerance: Of max |a - b| / max |a| in every tensor (default: half a unit in the last place of the coarser
            stored type, if the types differ, and the rounding of the maps).

    Raises:
        ModelError: The families differ.
        ValueError: The maps change the function.
    """
    if a.signature.family != b.signature.family:
        raise ModelError(f"'{a.name}' is of family {a.signature.family}, '{b.name}' of {b.signature.family}")
    means, mine, theirs = means or Means(), a.signature, b.signature
    mapped = alignment is not None and departure(mine, alignment.elements) <= MAPPED
    if alignment is not None and not mapped:
        raise ValueError("the maps of the alignment change the function")
    types = {a.stored_dtype, b.stored_dtype}
    rounding = max(torch.finfo(each).eps / 2 for each in types) if len(types) > 1 or mapped else 0.0
    allowed = max(rounding, MAPPED if mapped else 0.0) if tolerance is None else tolerance

    def differ(role: str) -> tuple[float, float]:
        if role not in mine.tensors or role not in theirs.tensors:
            return inf, inf
        x, y = (model.read(role, means.dtype, means.device) for model in (a, b))
        x = alignment.apply(mine, role, x) if alignment is not None else x
        if x.shape != y.shape:
            return inf, inf
        apart, scale = (float(t.abs().max()) if t.numel() else 0.0 for t in (x - y, x))
        return apart, apart / scale if scale else (inf if apart else 0.0)

    roles = list(dict.fromkeys([*mine.tensors, *theirs.tensors]))
    with torch.no_grad():
        found = list(in_order(differ, roles, means.workers))
    largest, relative = (max((pair[which] for pair in found), default=0.0) for which in (0, 1))
    return Verification(relative <= allowed, largest, relative, allowed, tuple(roles))
