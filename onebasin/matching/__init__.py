# SPDX-License-Identifier: Apache-2.0
"""Finding the alignment of two or more models: by weights, activations or learning. Tensors in, `Alignment` out.

Every method here passes cross-moments to a group's `nearest`; they differ in where the moments come from. Nothing here
reads a folder, writes a model, or merges.
"""

from .coordinate_descent import Run
from .matched import Matched
from .soft import soft_couplings
from .universe import Universe, match_universe
from .weights import Weights, match_weights

__all__ = ["Matched", "Run", "Universe", "Weights", "match_universe", "match_weights", "soft_couplings"]
