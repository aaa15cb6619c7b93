# SPDX-License-Identifier: Apache-2.0
"""mergekit's YAML: what a file may say (`schema`), which value it gives a tensor (`values`), and how it is carried out.

The meaning of every key is that of mergekit's documentation; `align` is the one addition, which mergekit itself passes
over.
"""

from .schema import Align, Recipe, Reference, Slice, Source, read_recipe
from .values import number, truth

__all__ = ["Align", "Recipe", "Reference", "Slice", "Source", "number", "read_recipe", "truth"]
