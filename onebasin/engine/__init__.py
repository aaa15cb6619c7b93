# SPDX-License-Identifier: Apache-2.0
"""Running independent units of work: in line, in threads of one machine, or on a Ray cluster; keeping their results.

A unit is a function call that shares nothing with the others. Nothing here knows what a unit computes, and results
do not depend on how many run at once. What cannot be cut into units, a gradient descent, can stop and go on. Files and
folders that are written appear whole or not at all.
"""

from collections.abc import Callable

from .cluster import on_ray
from .descent import MOST_STEPS, Descent, Pace
from .means import Means, bfloat16_is_faster, refuse_device
from .memory import available_memory, peak_memory
from .parallel import behind, in_order, in_parallel, meanwhile
from .placing import Appeared, Placing, appearing_file, appearing_text, clearly, placed_by
from .store import Cache, Store, kept

Tell = Callable[[str], None]  # how a job says what it is doing

__all__ = [
    "MOST_STEPS",
    "Appeared",
    "Cache",
    "Descent",
    "Means",
    "Pace",
    "Placing",
    "Store",
    "Tell",
    "appearing_file",
    "appearing_text",
    "available_memory",
    "behind",
    "bfloat16_is_faster",
    "clearly",
    "in_order",
    "in_parallel",
    "kept",
    "meanwhile",
    "on_ray",
    "peak_memory",
    "placed_by",
    "refuse_device",
]
