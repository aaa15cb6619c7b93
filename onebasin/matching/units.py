# SPDX-License-Identifier: Apache-2.0
"""Weight matching in independent units: the spaces of one layer that no tensor joins to another's, or all the rest.

What is found for a unit is small, a few maps. Units can be solved in any order, by any number of workers, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebasin.symmetry import Group, Signature

from .components import components_of, present


@dataclass(frozen=True)
class Unit:
    """roots: the spaces to solve. wide: whether one of them belongs to all layers, so that it is worth all workers."""

    name: str
    roots: tuple[str, ...]
    wide: bool


def units(signature: Signature, roles: Sequence[str], groups: Mapping[str, Group]) -> list[Unit]:
    """Return the units of a model: one for every layer, and one for every set of spaces coupled across layers."""
    layers: dict[int, list[str]] = {}
    found: list[Unit] = []
    for component in components_of(signature, roles, present(signature, roles, groups)):
        roots = [root for one in component.blocks for root in one.roots]
        numbers = {signature.spaces[root].layer for root in roots}
        if len(numbers) == 1 and (number := numbers.pop()) is not None:
            layers.setdefault(number, []).extend(roots)
        else:
            found.append(Unit(", ".join(sorted(roots)[:1]), tuple(roots), True))
    return [Unit(f"layer {number}", tuple(roots), False) for number, roots in sorted(layers.items())] + found
