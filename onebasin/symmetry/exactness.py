# SPDX-License-Identifier: Apache-2.0
"""Whether an alignment is one that leaves the function as it is, asked of its maps alone.

A model whose spaces are rewritten by elements of what acts on them computes what it computed (`audit` and the laws test
that the tables say so). What is left to check is that every map found is such an element: n numbers for a permutation,
products with random vectors for a matrix. No model is run, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .groups.elements import Element, Monomial
from .levels import largest_group
from .tables.signature import Signature


def departure(signature: Signature, elements: Mapping[str, Element], seed: int = 0) -> float:
    """Return the largest relative error with which random vectors see a map leave its group.

    Rounding is about 1e-12 in float64 and 1e-6 in float32.

    Raises:
        ValueError: naming the space, where a map is of a form or shape that may not act there at all, is not finite, or
            is no permutation.
    """
    refuse_other_shapes(signature, elements)
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for root, element in elements.items():
        kind = signature.kinds[root]
        try:
            worst = max(worst, largest_group(kind).departure(element, generator))
        except ValueError as error:
            raise ValueError(f"{error} (the space '{root}' of kind {kind})") from None
    return worst


def refuse_other_shapes(signature: Signature, elements: Mapping[str, Element]) -> None:
    """Raise ValueError where maps are not of the shapes that a model's spaces have, so that they belong to others."""
    for root, element in elements.items():
        space = signature.spaces.get(root)
        if space is None:
            raise ValueError(f"the alignment belongs to other models: these have no space '{root}'")
        shape = (*(signature.sizes[outer] for outer in space.batch), space.size)
        if isinstance(element, Monomial):
            found, expected = [element.index, element.scale], shape
        else:
            found, expected = [element.matrix, element.dual], (*shape, space.size)
        for numbers in found:
            if numbers is not None and tuple(numbers.shape) != expected:
                raise ValueError(f"the alignment belongs to other models: its map of '{root}' has the shape "
                                 f"{tuple(numbers.shape)}, not {expected}")  # fmt: skip
