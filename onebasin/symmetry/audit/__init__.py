# SPDX-License-Identifier: Apache-2.0
"""The completeness of a table's continuous symmetries: flat directions to first order, and the null space they span.

Only the study `audit` and the tests import this room.
"""
