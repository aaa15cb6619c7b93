# SPDX-License-Identifier: Apache-2.0
"""The transformers model of a folder: its configuration, and its weights with the head that a task needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from onebasin.models import Folder
from onebasin.running.loading import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TASKS", "configured", "load_model", "refuse_unfit"]

TASKS = {  # task -> the class of transformers that loads a model for it
    "image-classification": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "text-regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "speech-recognition": "AutoModelForSpeechSeq2Seq",
}


def load_model(model: str | Path, task: str) -> PreTrainedModel:
    """Return the model of a folder with the head for `task`, in float32 and eval mode.

    Raises ValueError where the folder cannot be loaded that way, or lacks a tensor, which would be left random.
    """
    return load(Folder(model), torch.float32, cls=_class_for(model, task))[0]


def refuse_unfit(models: Sequence[str | Path], task: str) -> None:
    """Raise ValueError, before anything is loaded, for a model that does not exist, is damaged, or is not for the task.

    Looks at configurations and the headers of weight files. Raises as `load_model` does.
    """
    for model in models:
        _class_for(model, task)


def _class_for(model: str | Path, task: str) -> Any:
    """Return the class that loads a model for a task."""
    _, config = configured(model)
    known = getattr(transformers, TASKS[task])._model_mapping
    if type(config) not in known:
        raise ValueError(f"'{model}' is a {config.model_type} model, for which there is no {task}")
    found = known[type(config)]
    several = found if isinstance(found, tuple) else (found,)
    return next((cls for cls in several if cls.__name__ in (config.architectures or ())), several[0])


def configured(model: str | Path) -> tuple[Path, Any]:
    """Return a model's folder and its configuration."""
    checkpoint = Folder(model)
    kind = checkpoint.raw_config["model_type"]  # which names what is wrong with a damaged config.json
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"'{model}' is of type '{kind}', which transformers has no class for, so it cannot be run")
    assert checkpoint.config  # which names the reason where the class refuses it
    return checkpoint.folder, CONFIG_MAPPING[kind].from_dict(checkpoint.raw_config)
