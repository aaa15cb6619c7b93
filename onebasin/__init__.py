# SPDX-License-Identifier: Apache-2.0
"""Onebasin: put transformers that were trained apart into one loss basin, and merge them there."""

from .api import Options, canonical, distance, match, merge, verify
from .checkpoint import Checkpoint, CheckpointError
from .fusion import METHODS
from .symmetry import Alignment, Signature, TableError

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Alignment",
    "Checkpoint",
    "CheckpointError",
    "Options",
    "Signature",
    "TableError",
    "__version__",
    "canonical",
    "distance",
    "match",
    "merge",
    "verify",
]
