# SPDX-License-Identifier: Apache-2.0
"""How much memory weight matching takes, from shapes alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod

from onebasin.symmetry import Group, Signature

from .weights import _components


def tensors_held(
    signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], workers: int | None = None
) -> int:
    """Number of entries of the source's tensors that `match_weights` holds at once, with its arguments.

    These are the largest components that run side by side, one per worker (default: one per core). The anchor's
    tensors come on top, as many again; moments and maps are small beside them and not counted.
    """
    counted = list(roles)
    present = {signature.root[leaf.space] for role in counted for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    sizes = [
        sum(prod(signature.tensors[role].shape) for role in component.roles)
        for component in _components(signature, counted, active)
    ]
    return sum(sorted(sizes, reverse=True)[: workers or os.cpu_count() or 1])
