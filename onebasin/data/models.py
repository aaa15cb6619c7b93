# SPDX-License-Identifier: Apache-2.0
"""The transformers model of a folder: its configuration, and its weights with the head that a task needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING

from onebasin.models import Folder
from onebasin.running.classes import quietly as quiet
from onebasin.running.expert_layout import one_by_one_where_needed
from onebasin.running.loading import refuse_larger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TASKS", "configured", "load_model", "quiet", "refuse_unfit"]

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
    folder, config, auto = _class_for(model, task)
    refuse_larger(str(model), auto._model_mapping[type(config)], config, Folder(folder).shapes)
    try:
        with quiet():
            loaded, info = auto.from_pretrained(
                folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load '{model}' for {task}: {str(error).strip().splitlines()[0]}") from None
    if info["missing_keys"]:
        raise ValueError(f"'{model}' has no tensor '{min(info['missing_keys'])}', which {task} needs")
    for name, held, needed in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"'{model}': '{name}' has shape {tuple(held)}, and {task} needs {tuple(needed)} by config.json"
        )
    result: PreTrainedModel = loaded.float().eval()
    one_by_one_where_needed(result)
    return result


def refuse_unfit(models: Sequence[str | Path], task: str) -> None:
    """Raise ValueError, before anything is loaded, for a model that does not exist, is damaged, or is not for the task.

    Looks at configurations and the headers of weight files. Raises as `load_model` does.
    """
    for model in models:
        _class_for(model, task)


def _class_for(model: str | Path, task: str) -> tuple[Path, Any, Any]:
    """Return a model's folder, its configuration, and the class that loads it for a task."""
    folder, config = configured(model)
    auto = getattr(transformers, TASKS[task])
    if type(config) not in auto._model_mapping:
        raise ValueError(f"'{model}' is a {config.model_type} model, for which there is no {task}")
    return folder, config, auto


def configured(model: str | Path) -> tuple[Path, Any]:
    """Return a model's folder and its configuration."""
    checkpoint = Folder(model)
    kind = checkpoint.raw_config["model_type"]  # which names what is wrong with a damaged config.json
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"'{model}' is of type '{kind}', which transformers has no class for, so it cannot be run")
    assert checkpoint.config  # which names the reason where the class refuses it
    return checkpoint.folder, CONFIG_MAPPING[kind].from_dict(checkpoint.raw_config)
