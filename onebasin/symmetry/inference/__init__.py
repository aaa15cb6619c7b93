# SPDX-License-Identifier: Apache-2.0
"""Tables inferred from a model's class: it runs once on tensors that carry axes, and the result is a table.

Nothing here knows a model type, reads weights, or uses the name of a module to find out what it does.
"""
