# SPDX-License-Identifier: Apache-2.0
"""Whether an alignment is one that leaves the function as it is, asked of its maps alone.

A model whose spaces are rewritten by elements of what acts on them computes what it computed (`audit` and the laws test
that the tables say so). What is left to check is that every map found is such an element: n numbers for a permutation,
products with random vectors for a matrix. No model is run, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .groups.elements import Element
from .levels import largest_group
from .tables.signature import Signature


def departure(signature: Signature, elements: Mapping[str, Element], seed: int = 0) -> float:
    """Return the largest relative error with which random vectors see a map leave its group.

    Rounding is about 1e-12 in float64 and 1e-6 in float32.

    Args:
        signature: of the model that is rewritten.
        elements: root space -> map.
        seed: of the random vectors.

    Raises:
        ValueError: naming the space, where a map is of a form that may not act there at all, is not finite, or is no
            permutation.
    """
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for root, element in elements.items():
        kind = signature.kinds[root]
        try:
            worst = max(worst, largest_group(kind).departure(element, generator))
        except ValueError as error:
            raise ValueError(f"{error} (the space '{root}' of kind {kind})") from None
    return worst
