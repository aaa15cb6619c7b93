# SPDX-License-Identifier: Apache-2.0
"""Are a table's continuous symmetries all there are? Flat directions to first order, and the null space that they span.

Only the job `audit` and the tests import this room.
"""
