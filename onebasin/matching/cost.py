# SPDX-License-Identifier: Apache-2.0
"""How much memory matching takes, from shapes alone: a matter of width and of the number of workers, not of depth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod

from onebasin.symmetry import Group, Signature
from onebasin.symmetry.groups import ISOMETRIES
from onebasin.symmetry.groups.scaling import CHUNK

from .weights import _components, _Unit

COPIES = 4  # of a tensor that is at work: the anchor's, the source's, the rewritten one, and a temporary of its size
QUARTIC = 60  # for a scale that is solved for: float64 temporaries of `best_scale`
MOMENTS = 8  # matrices of a space's size: moments of writers and readers, their sum and terms, what a solver works on


def numbers_held(
    signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], workers: int | None = None
) -> int:
    """About how many numbers are in memory at most while models are matched and written: what a few tensors take.

    Of a layer every worker holds the tensors that one set of coupled heads touches, or else one tensor, and the moments
    of the space that it solves; of what belongs to all layers, two tensors for every worker and the moments of all.
    """
    counted = list(roles)
    count = workers or os.cpu_count() or 1
    present = {signature.root[leaf.space] for role in counted for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    largest = max(sizes.values(), default=0)
    held = 2 * count * COPIES * largest  # distances, and writing
    for component in _components(signature, counted, active):
        for unit in component.units:
            touched = {role for root in (unit.root, *unit.inner) for role in signature.touching[root]} & sizes.keys()
            shared = signature.spaces[unit.root].layer is None
            together = sum(sizes[role] for role in touched) if unit.inner and not shared else largest
            moments = _moments(signature, unit)
            scaled = any(not isinstance(active[root], ISOMETRIES) for root in (unit.root, *unit.inner))
            solver = QUARTIC * min(CHUNK, moments) if scaled else 0
            held = max(held, (COPIES * together + MOMENTS * moments + solver) * (2 * count if shared else count))
    return held


def _moments(signature: Signature, unit: _Unit) -> int:
    """Entries of the moments of a unit: with inner spaces, those of all pairs of its blocks."""

    def entries(root: str) -> int:
        space = signature.spaces[root]
        return int(space.size**2 * prod(signature.sizes[outer] for outer in space.batch))

    blocks = signature.spaces[unit.root].size
    return sum(blocks * entries(root) for root in unit.inner) or entries(unit.root)
