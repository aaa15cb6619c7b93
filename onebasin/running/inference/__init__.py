# SPDX-License-Identifier: Apache-2.0
"""Inferring what acts on a model from its own class: a twin runs once on tensors that carry axes, and what was found is
written as a table, proven, and kept."""

from .known import of_config, table_of
from .proof import proved
from .search import Inferred, infer
from .tracing import Traced, traced

__all__ = ["Inferred", "Traced", "infer", "of_config", "proved", "table_of", "traced"]
