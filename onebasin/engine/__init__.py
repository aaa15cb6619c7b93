# SPDX-License-Identifier: Apache-2.0
"""Independent units of work, run in line, in threads or on a Ray cluster; storage of their results; atomic output.

A unit is a function call that shares no state with the others. This room does not know what a unit computes, and
results do not depend on how many units run at once. A gradient descent, which cannot be split into units, can be
interrupted and resumed. Output files and folders appear whole or not at all.
"""

from collections.abc import Callable

from .cluster import on_ray
from .descent import MOST_STEPS, Descent, Pace
from .means import Means, bfloat16_is_faster, in_bfloat16, refuse_device
from .memory import KEPT, available_memory, peak_memory
from .parallel import behind, fastest_threads, in_order, meanwhile, threads
from .placing import Appeared, Placing, appearing_file, appearing_json, appearing_text, clearly, placed_by
from .spill import Spill
from .store import Cache, Store, kept

Tell = Callable[[str], None]  # receives a job's progress messages

__all__ = [
    "KEPT",
    "MOST_STEPS",
    "Appeared",
    "Cache",
    "Descent",
    "Means",
    "Pace",
    "Placing",
    "Spill",
    "Store",
    "Tell",
    "appearing_file",
    "appearing_json",
    "appearing_text",
    "available_memory",
    "behind",
    "bfloat16_is_faster",
    "clearly",
    "fastest_threads",
    "in_bfloat16",
    "in_order",
    "kept",
    "meanwhile",
    "on_ray",
    "peak_memory",
    "placed_by",
    "refuse_device",
    "threads",
]
