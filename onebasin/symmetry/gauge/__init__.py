# SPDX-License-Identifier: Apache-2.0
"""Freedoms that a model's function does not see: the dataflow that shows them, the canonical form, widening.

Everything is derived from a signature. Nothing here compares two models' numbers or searches for anything.
"""
