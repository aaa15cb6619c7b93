# SPDX-License-Identifier: Apache-2.0
"""The loss between models: interpolation, the barrier on a line or over a triangle, and their plots.

This room reads model folders and evaluates them on a task. It neither matches nor merges, and writes only images.
"""

from .line import barrier, curve, interpolate
from .simplex import simplex

__all__ = ["barrier", "curve", "interpolate", "simplex"]
