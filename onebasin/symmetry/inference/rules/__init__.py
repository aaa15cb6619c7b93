# SPDX-License-Identifier: Apache-2.0
"""One rule per kind of operation: which maps of the axes that enter it come out as maps of the axes that leave it."""

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
