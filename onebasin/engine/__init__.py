# SPDX-License-Identifier: Apache-2.0
"""Running independent units of work: in line, in threads of one machine, or on a Ray cluster; keeping their results.

A unit is a function call that shares nothing with the others. Nothing here knows what a unit computes, and results
do not depend on how many run at once. What cannot be cut into units, a gradient descent, can stop and go on.
"""

from collections.abc import Callable

from .cluster import on_ray
from .descent import Descent
from .memory import peak_memory
from .parallel import behind, in_order, in_parallel, meanwhile
from .store import Store, discard, kept, missing_parents

Tell = Callable[[str], None]  # how a job says what it is doing

__all__ = [
    "Descent",
    "Store",
    "Tell",
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
