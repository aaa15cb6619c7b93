# SPDX-License-Identifier: Apache-2.0
"""Tables inferred from a model's own class: it runs once on tensors that carry axes, and what comes out is a table.

Nothing here knows a model type, reads a weight or looks at a module's name to find out what it does.
"""
