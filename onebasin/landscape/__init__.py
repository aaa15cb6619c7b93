# SPDX-License-Identifier: Apache-2.0
"""The loss between models: interpolation, the barrier along a line or over a triangle, and their plots.

It reads model folders and measures them on a task. It neither matches nor merges, and writes only pictures.
"""

from .line import barrier, curve, interpolate
from .simplex import simplex

__all__ = ["barrier", "curve", "interpolate", "simplex"]
