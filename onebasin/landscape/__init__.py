# SPDX-License-Identifier: Apache-2.0
"""What the loss does between two models: interpolation, the barrier along a line, and their plots.

It reads model folders and measures them on a task. It neither matches nor merges, and writes only pictures.
"""

from .line import barrier, curve, interpolate

__all__ = ["barrier", "curve", "interpolate"]
