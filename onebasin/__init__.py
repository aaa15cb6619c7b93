# SPDX-License-Identifier: Apache-2.0
"""Onebasin: put transformers that were trained apart into one loss basin, and merge them there."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebasin.data import Scores as Scores
    from onebasin.fusion import METHODS as METHODS
    from onebasin.jobs.apply import ModelAlignment as ModelAlignment
    from onebasin.jobs.canonical import canonical as canonical
    from onebasin.jobs.check import check as check
    from onebasin.jobs.compare import distance as distance
    from onebasin.jobs.compare import verify as verify
    from onebasin.jobs.layers import merge_best_layers as merge_best_layers
    from onebasin.jobs.match import match as match
    from onebasin.jobs.measure import Barrier as Barrier
    from onebasin.jobs.measure import barrier as barrier
    from onebasin.jobs.measure import evaluate as evaluate
    from onebasin.jobs.merge import merge as merge
    from onebasin.jobs.mergekit.merge_file import merge_config as merge_config
    from onebasin.jobs.options import Options as Options
    from onebasin.jobs.options import StateDict as StateDict
    from onebasin.jobs.refine import refine as refine
    from onebasin.jobs.results import MatchResult as MatchResult
    from onebasin.jobs.results import MergeResult as MergeResult
    from onebasin.jobs.results import Result as Result
    from onebasin.jobs.statistics import statistics as statistics
    from onebasin.jobs.verdict import Verdict as Verdict
    from onebasin.models import Folder as Folder
    from onebasin.models import ModelError as ModelError
    from onebasin.symmetry import Alignment as Alignment
    from onebasin.symmetry import Signature as Signature
    from onebasin.symmetry import TableError as TableError

__version__ = "0.1.0"

_ROOM = {
    **{name: f".jobs.{name}" for name in ("canonical", "check", "match", "merge", "refine", "statistics")},
    **dict.fromkeys(("distance", "verify"), ".jobs.compare"),
    **dict.fromkeys(("Barrier", "barrier", "evaluate"), ".jobs.measure"),
    **dict.fromkeys(("MatchResult", "MergeResult", "Result"), ".jobs.results"),
    "ModelAlignment": ".jobs.apply",
    "Verdict": ".jobs.verdict",
    "Scores": ".data",
    **dict.fromkeys(("Options", "StateDict"), ".jobs.options"),
    "merge_best_layers": ".jobs.layers",
    "merge_config": ".jobs.mergekit.merge_file",
    **dict.fromkeys(("Folder", "ModelError"), ".models"),
    **dict.fromkeys(("METHODS",), ".fusion"),
    **dict.fromkeys(("Alignment", "Signature", "TableError"), ".symmetry"),
}

__all__ = ["__version__", *_ROOM]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch and transformers take seconds, which `onebasin --help` can spare."""
    if name not in _ROOM:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_ROOM[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
