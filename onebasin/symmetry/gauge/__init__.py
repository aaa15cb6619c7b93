# SPDX-License-Identifier: Apache-2.0
"""Redundant parameters, which do not affect the function: their dataflow, the canonical form without them, widening.

Everything is derived from a signature. Nothing here compares the weights of two models or searches.
"""
