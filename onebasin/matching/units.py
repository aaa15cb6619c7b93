# SPDX-License-Identifier: Apache-2.0
"""Weight matching in independent units: the spaces of one layer that no tensor joins to another's, or all the rest.

What is found for a unit is small, a few maps. Units can be solved in any order, by any number of workers, and kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onebasin.symmetry import Alignment, Group, Signature

from .components import components_of
from .weights import Matched, Read, match_weights


@dataclass(frozen=True)
class Unit:
    """roots: the spaces to solve. wide: whether one of them belongs to all layers, so that it is worth all workers."""

    name: str
    roots: tuple[str, ...]
    wide: bool


def units(signature: Signature, roles: Sequence[str], groups: Mapping[str, Group]) -> list[Unit]:
    """Return the units of a model: one for every layer, and one for every set of spaces coupled across layers."""
    present = {signature.root[leaf.space] for role in roles for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    layers: dict[int, list[str]] = {}
    found: list[Unit] = []
    for component in components_of(signature, roles, active):
        roots = [root for one in component.blocks for root in one.roots]
        numbers = {signature.spaces[root].layer for root in roots}
        if len(numbers) == 1 and (number := numbers.pop()) is not None:
            layers.setdefault(number, []).extend(roots)
        else:
            found.append(Unit(", ".join(sorted(roots)[:1]), tuple(roots), True))
    return [Unit(f"layer {number}", tuple(roots), False) for number, roots in sorted(layers.items())] + found


def solve(
    signature: Signature,
    read: Read,
    groups: Mapping[str, Group],
    unit: Unit,
    *,
    roles: Sequence[str],
    workers: int | None = None,
    **how: Any,
) -> Matched:
    """Match the spaces of one unit; arguments as in `match_weights`."""
    mine = {root: groups[root] for root in unit.roots}
    return match_weights(signature, read, mine, roles=roles, workers=workers if unit.wide else 1, **how)


def joined(found: Iterable[Matched]) -> Matched:
    """Join the results of all units into one."""
    found = list(found)
    elements = {root: element for one in found for root, element in one.alignment.elements.items()}
    batch = {root: over for one in found for root, over in one.alignment.batch.items()}
    apart = {role: distance for one in found for role, distance in one.apart.items()}
    before = sum(apart.values())
    # A fused tensor may belong to several units through disjoint blocks, so gains add where distances do not.
    length = max((len(one.objective) for one in found), default=1)
    objective = [
        before - sum(one.before - one.objective[min(i, len(one.objective) - 1)] for one in found) for i in range(length)
    ]
    return Matched(Alignment(elements, batch), before, objective, apart)
