# SPDX-License-Identifier: Apache-2.0
"""Running independent units of work: in line, or in threads of one machine.

A unit is a function call that shares nothing with the others. Nothing here knows what a unit computes, and results
do not depend on how many run at once.
"""

from .parallel import behind, in_order, in_parallel

__all__ = ["behind", "in_order", "in_parallel"]
