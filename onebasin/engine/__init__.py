# SPDX-License-Identifier: Apache-2.0
"""Running independent units of work: in line, in threads of one machine, or on a Ray cluster; keeping their results.

A unit is a function call that shares nothing with the others. Nothing here knows what a unit computes, and results
do not depend on how many run at once.
"""

from .cluster import on_ray
from .memory import peak_memory
from .parallel import behind, in_order, in_parallel, meanwhile
from .store import Store, discard, kept, missing_parents

__all__ = [
    "Store",
    "behind",
    "discard",
    "in_order",
    "in_parallel",
    "kept",
    "meanwhile",
    "missing_parents",
    "on_ray",
    "peak_memory",
]
