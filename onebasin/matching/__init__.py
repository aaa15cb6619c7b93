# SPDX-License-Identifier: Apache-2.0
"""Finding the alignment: from the weights of two models, or of many. Tensors in, `Alignment` out.

Every method here hands cross-moments to a group's `nearest`; what differs is where the moments come from.
Nothing here reads a folder, writes a model, or merges.
"""

from .coordinate_descent import Matched, Run
from .soft import soft_couplings
from .universe import Universe, match_universe
from .weights import Weights, match_weights

__all__ = ["Matched", "Run", "Universe", "Weights", "match_universe", "match_weights", "soft_couplings"]
