# SPDX-License-Identifier: Apache-2.0
"""The mathematics: axis notation, spaces, groups, family signatures, alignments.

A model is a set of tensors whose axes live in named spaces; a symmetry is one group element per space. Nothing here
knows a model family, a file format or an algorithm that needs data. It imports torch and scipy, and no other room.
"""

from .alignment import Alignment
from .groups import Group, Moments
from .levels import LEVELS, PARTS, RESCALE, acting_groups
from .tables.conditions import OtherSizes, OtherTensors, TableError
from .tables.resolve import resolve
from .tables.signature import Entry, Norm, Signature, Space
from .tables.table import Table, read_table

__all__ = [
    "LEVELS",
    "PARTS",
    "RESCALE",
    "Alignment",
    "Entry",
    "Group",
    "Moments",
    "Norm",
    "OtherSizes",
    "OtherTensors",
    "Signature",
    "Space",
    "Table",
    "TableError",
    "acting_groups",
    "read_table",
    "resolve",
]
