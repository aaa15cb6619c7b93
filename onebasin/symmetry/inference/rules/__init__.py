# SPDX-License-Identifier: Apache-2.0
"""One rule per kind of operation: the axes of its outputs, and the maps of its inputs' axes that commute with it."""

from . import (  # noqa: F401 (each registers its rules)
    arithmetic,
    attention,
    contractions,
    convolutions,
    indexing,
    joining,
    maps,
    masks,
    norms,
    pointwise,
    reductions,
    routing,
    shapes,
    storing,
)
from .places import moved
from .registry import RULES
from .silent import SILENT

__all__ = ["RULES", "SILENT", "moved"]
