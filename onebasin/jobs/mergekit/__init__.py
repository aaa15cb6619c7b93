# SPDX-License-Identifier: Apache-2.0
"""mergekit's YAML: its schema, the values that it gives to tensors, and the merge that it describes.

Every key means what mergekit's documentation says; `align` is the one addition, which mergekit itself ignores.
"""

from .parameters import number, truth
from .schema import Align, Recipe, Reference, Slice, Source, read_recipe

__all__ = ["Align", "Recipe", "Reference", "Slice", "Source", "number", "read_recipe", "truth"]
