# SPDX-License-Identifier: Apache-2.0
"""Running the model classes of `transformers`: loaded and lazy weights, tracing, probes, verification.

Models come from `onebasin.models` and keep their names there. Nothing here knows a model family, and the only files
that are written are inferred tables in the user's cache.
"""

from .loaded import LoadedModel, loaded_model
from .loading import pretrained
from .verification import Verification, compare, compare_models, compare_rewritten, tolerance_of

__all__ = [
    "LoadedModel",
    "Verification",
    "compare",
    "compare_models",
    "compare_rewritten",
    "loaded_model",
    "pretrained",
    "tolerance_of",
]
