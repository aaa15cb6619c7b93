# SPDX-License-Identifier: Apache-2.0
"""A model on disk, and views of one: lazy reading, canonical and widened forms, rewriting, atomic writing, LoRA, cards.

Everything that touches the disk lives here. Nothing here runs a model (`onebasin.running` does), knows a model family
(tables do), or searches for an alignment.
"""

from .card import model_card, provenance
from .distance import Distances, before_and_after, distances
from .errors import ModelError
from .fetching import locate
from .folder import DTYPES, Folder
from .lazy_tensors import LazyTensors
from .model import Held, Model, View, numel
from .pairing import Common, Shared, common_roles, of_one_width, read_pair, shared_roles
from .views import Canonical, Rewritten, Widened
from .weight_files import Target
from .writer import write_into, write_model

__all__ = [
    "DTYPES",
    "Canonical",
    "Common",
    "Distances",
    "Folder",
    "Held",
    "LazyTensors",
    "Model",
    "ModelError",
    "Rewritten",
    "Shared",
    "Target",
    "View",
    "Widened",
    "before_and_after",
    "common_roles",
    "distances",
    "locate",
    "model_card",
    "numel",
    "of_one_width",
    "provenance",
    "read_pair",
    "shared_roles",
    "write_into",
    "write_model",
]
