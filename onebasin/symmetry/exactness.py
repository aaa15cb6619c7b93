# SPDX-License-Identifier: Apache-2.0
"""A check that an alignment does not change the function, from its maps alone.

A model whose spaces are rewritten by elements of their groups computes the same function (`audit` and the laws test
this for the tables). It remains to check that every map is such an element: by n numbers for a permutation, and by
products with random vectors for a matrix. No model is run, and no weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .groups.elements import Element, Monomial
from .levels import largest_group
from .tables.signature import Signature


def departure(signature: Signature, elements: Mapping[str, Element], seed: int = 0) -> float:
    """Return the largest relative error by which a map deviates from its group on random vectors.

    Rounding is about 1e-12 in float64 and 1e-6 in float32.

    Raises:
        ValueError: A map has a form or shape that cannot act on its space, is not finite, or is not a permutation.
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
    """Raise ValueError if the shapes of maps do not fit a model's spaces, so that they belong to other models."""
    for root, element in elements.items():
        space = signature.spaces.get(root)
        if space is None:
            raise ValueError(f"the alignment belongs to other models: these have no space '{root}'")
        shape = (*(signature.sizes[outer] for outer in space.batch), space.size)
        expected = shape if isinstance(element, Monomial) else (*shape, space.size)
        for numbers in element.parts.values():
            if tuple(numbers.shape) != expected:
                raise ValueError(f"the alignment belongs to other models: its map of '{root}' has the shape "
                                 f"{tuple(numbers.shape)}, not {expected}")  # fmt: skip
