# SPDX-License-Identifier: Apache-2.0
"""The tensors of the model itself, which is built without weights: a table is inferred from twins that have fewer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from onebasin.running import twins
from onebasin.running.classes import without_memory
from onebasin.symmetry import OtherTensors, TableError, read_table, resolve

from .tracing import as_stored, untied

Stored = tuple[dict[str, tuple[int, ...]], dict[str, Any]]  # the shapes of all tensors in a file, and config.json


def stored(config: PretrainedConfig | str, cls: str) -> Stored | None:
    """Return what a folder has of a model with random weights; None if the class refuses the configuration.

    config: a configuration, or a model type, for its default configuration. cls: the name of the class.
    """
    try:
        whole, kind = twins.of_class(config, cls)
        model = without_memory(kind, whole)
        with torch.device("meta"):  # for what the names of a file are computed with
            tied = untied(model)
            state = {name: one for name, one in model.state_dict().items() if name not in tied}
            shapes = {name: tuple(one.shape) for name, one in as_stored(model, state).items()}
    except Exception:  # each class has its own checks, and some of them fail for its own defaults
        return None
    return shapes, {**model.config.to_dict(), "architectures": [cls]}


def named(text: str, model: Stored) -> bool:
    """Return whether a table has all tensors of a model, and no others. Sizes that do not fit are no matter here."""
    try:
        resolve(read_table(text, "inferred"), *model)
    except TableError as error:
        return not isinstance(error, OtherTensors)
    return True
