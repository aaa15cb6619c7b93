# SPDX-License-Identifier: Apache-2.0
"""The candidates of a search for the best way to merge, the chosen one, and an earlier result to continue from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.fusion import loadable
from onebasin.fusion.method import Merged, Method
from onebasin.jobs.aligning import Aligned
from onebasin.jobs.frame import Frame
from onebasin.models import Folder
from onebasin.running.trace import Batch


@dataclass(frozen=True)
class Chosen:
    """The best candidate, and what to say about it.

    frame: of the aligned models. merged: None if the method has not run yet. held: the held-out data; empty if nothing
    was tried. judged_on: a description of them.
    """

    frame: Frame
    aligned: Aligned
    method: Method
    merged: Merged | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    held: Sequence[Batch] = ()
    judged_on: str = ""


@dataclass(frozen=True)
class Candidate:
    """A merged model. tensors: by role. losses: divergence on each held-out example, (examples,)."""

    name: str
    frame: Frame
    aligned: Aligned
    method: Method
    tensors: Mapping[str, Tensor]
    losses: Tensor
    facts: Mapping[str, Any]

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def way(self) -> str:
        return way_of(self.name)


def way_of(name: str) -> str:
    """Return the way of matching that the name of a candidate begins with."""
    return name.split(",")[0]


@dataclass(frozen=True)
class Earlier:
    """The result of an earlier search. chosen: the candidate's name, and method: its method. few: how many examples
    closed forms used. sha256: hashes of all files of the merged models."""

    model: Folder
    chosen: str
    method: Method
    few: int
    sha256: list[Mapping[str, str]]

    @classmethod
    def of(cls, folder: str | Path, family: str | None) -> Earlier | None:
        """Read the result from a folder that a search has written; return None if there is none."""
        try:
            facts = json.loads((Path(folder) / "onebasin.json").read_text("utf-8"))
            result, sha256 = facts["result"], [one["sha256"] for one in facts["inputs"]]
            report, method = result["search"], loadable()[result["method"]](**result.get("settings", {}))
            return cls(Folder(Path(folder), family), report["chosen"], method, report["few"], sha256)
        except (OSError, ValueError, KeyError, TypeError):
            return None
