# SPDX-License-Identifier: Apache-2.0
"""Writing an inferred table: names for spaces, one block for all layers, lines for norms.

A `Draft` passes through the steps: `ordering` puts tensors in the order of tables, `settling` fixes what a table cannot
express, `layers` makes the layers of a block alike and finds the spaces, `batches` finds those with a map for each
entry of others, `names` names them, and `lines` writes the tensors. `table` runs these, and puts the sections together.
"""
