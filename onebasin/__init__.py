# SPDX-License-Identifier: Apache-2.0
"""Onebasin: put transformers that were trained apart into one loss basin, and merge them there."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebasin.data import Scores
    from onebasin.fusion import METHODS
    from onebasin.jobs.apply import ModelAlignment
    from onebasin.jobs.canonical import canonical
    from onebasin.jobs.check import check
    from onebasin.jobs.compare import distance, verify
    from onebasin.jobs.layers import merge_best_layers
    from onebasin.jobs.match import match
    from onebasin.jobs.measure import Barrier, barrier, evaluate
    from onebasin.jobs.merge import merge
    from onebasin.jobs.mergekit.merge_file import merge_config
    from onebasin.jobs.options import Options, StateDict
    from onebasin.jobs.refine import refine
    from onebasin.jobs.results import MatchResult, MergeResult, Result
    from onebasin.jobs.statistics import statistics
    from onebasin.jobs.verdict import Verdict
    from onebasin.models import Folder, ModelError
    from onebasin.symmetry import Alignment, Signature, TableError

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Alignment",
    "Barrier",
    "Folder",
    "MatchResult",
    "MergeResult",
    "ModelAlignment",
    "ModelError",
    "Options",
    "Result",
    "Scores",
    "Signature",
    "StateDict",
    "TableError",
    "Verdict",
    "__version__",
    "barrier",
    "canonical",
    "check",
    "distance",
    "evaluate",
    "match",
    "merge",
    "merge_best_layers",
    "merge_config",
    "refine",
    "statistics",
    "verify",
]

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


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch and transformers take seconds, which `onebasin --help` can spare."""
    if name not in _ROOM:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_ROOM[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
