# SPDX-License-Identifier: Apache-2.0
"""Model folders: lazy reading, pairs of tensors, distances, atomic writing, model cards, verification.

Everything that touches the disk or a stock `transformers` model lives here, and no algorithm does.
Nothing here knows a model family: tables say what a tensor is, `transformers` says how a model runs.
"""

from .card import model_card, provenance
from .distance import Distances, before_and_after, distances
from .gauge import Canonical, Widened
from .making import Making
from .pairing import Shared, read_pair, shared_roles
from .reader import DTYPES, Checkpoint, CheckpointError, locate
from .stock import Stock, stock_model
from .verification import Verification, compare, compare_models, compare_rewritten, load_model, tolerance_of
from .writer import write_model

__all__ = [
    "DTYPES",
    "Canonical",
    "Checkpoint",
    "CheckpointError",
    "Distances",
    "Making",
    "Shared",
    "Stock",
    "Verification",
    "Widened",
    "before_and_after",
    "compare",
    "compare_models",
    "compare_rewritten",
    "distances",
    "load_model",
    "locate",
    "model_card",
    "provenance",
    "read_pair",
    "shared_roles",
    "stock_model",
    "tolerance_of",
    "write_model",
]
