# SPDX-License-Identifier: Apache-2.0
"""The result of matching, and how results for separate spaces are joined."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from onebasin.symmetry import Alignment


@dataclass
class Matched:
    """The result of matching.

    alignment: one element per active space. before: the weighted squared distance before any move, over every tensor
    that an active space touches. objective: the same at the start of the descent (coupled spaces are first placed from
    the tensors anchored in fixed spaces), then after every sweep; it never increases. apart: `before`, by role.
    """

    alignment: Alignment
    before: float
    objective: list[float] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        notes = {"before": self.before, "objective": self.objective, "apart": self.apart}
        self.alignment.save(path, {"matched": json.dumps(notes)})

    @classmethod
    def load(cls, path: Path) -> Matched:
        """Read what `save` wrote. Raises ValueError for any other file."""
        alignment = Alignment.load(path)
        with safe_open(str(path), "pt") as file:
            return cls(alignment, **json.loads(file.metadata()["matched"]))


def joined(found: Iterable[Matched]) -> Matched:
    """Join the results for sets of spaces that were matched separately."""
    found = list(found)
    elements = {root: element for one in found for root, element in one.alignment.elements.items()}
    batch = {root: over for one in found for root, over in one.alignment.batch.items()}
    apart = {role: distance for one in found for role, distance in one.apart.items()}
    before = sum(apart.values())
    # A fused tensor may belong to several of them through disjoint blocks, so gains add where distances do not.
    length = max((len(one.objective) for one in found), default=1)
    objective = [
        before - sum(one.before - one.objective[min(i, len(one.objective) - 1)] for one in found) for i in range(length)
    ]
    return Matched(Alignment(elements, batch), before, objective, apart)
