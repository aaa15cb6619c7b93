# SPDX-License-Identifier: Apache-2.0
"""The notation: axes, tables, sizes, conditions, and the signature of a checkpoint by its table.

Nothing here knows a particular table, what `nearest` is, or a file format of weights: only names, shapes and configs.
"""
