# SPDX-License-Identifier: Apache-2.0
"""The notation: axes, reading a table, sizes, conditions, and what a table becomes when it meets a checkpoint.

Nothing here knows a particular table, what `nearest` is, or a file format of weights: names, shapes and configs only.
"""
