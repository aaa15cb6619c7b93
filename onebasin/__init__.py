# SPDX-License-Identifier: Apache-2.0
"""Onebasin: put transformers that were trained apart into one loss basin, and merge them there."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, CheckpointError
    from .fusion import METHODS
    from .jobs.canonical import canonical
    from .jobs.check import check
    from .jobs.compare import distance, verify
    from .jobs.layers import merge_best_layers
    from .jobs.match import match
    from .jobs.merge import merge
    from .jobs.options import Options, StateDict
    from .jobs.recipe import merge_config
    from .jobs.refine import refine
    from .jobs.statistics import statistics
    from .symmetry import Alignment, Signature, TableError

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Alignment",
    "Checkpoint",
    "CheckpointError",
    "Options",
    "Signature",
    "StateDict",
    "TableError",
    "__version__",
    "canonical",
    "check",
    "distance",
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
    **dict.fromkeys(("Options", "StateDict"), ".jobs.options"),
    "merge_best_layers": ".jobs.layers",
    "merge_config": ".jobs.recipe",
    **dict.fromkeys(("Checkpoint", "CheckpointError"), ".checkpoint"),
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
