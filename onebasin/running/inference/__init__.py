# SPDX-License-Identifier: Apache-2.0
"""Inferring the symmetries of a model from its class: a twin runs once on tensors that carry axes, and the result is
written as a table, proven and cached."""

from .known import of_config, table_of
from .proof import proved
from .search import Inferred, infer
from .tracing import Traced, traced

__all__ = ["Inferred", "Traced", "infer", "of_config", "proved", "table_of", "traced"]
