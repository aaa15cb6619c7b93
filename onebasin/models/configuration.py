# SPDX-License-Identifier: Apache-2.0
"""A model's configuration: checks of its values, and the defaults of its class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from .errors import ModelError

_LAYERS, _LABELS = 1000, 10**6  # most layers (if there are fewer tensors) and most labels that are plausible


def refuse_kinds(config: dict[str, Any], path: Path) -> None:
    """Raise ModelError if a value that is read from every config, and that no class checks, has the wrong type."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"'{path}': architectures is {str(names)[:40]!r}, not a list of names")
    for key in ("id2label", "label2id"):
        if not isinstance(config.get(key), dict | None):
            raise ModelError(f"'{path}': {key} is {str(config[key])[:40]!r}, not an object")


def refuse_counts(config: dict[str, Any], tensors: int, path: Path) -> None:
    """Raise ModelError for more layers than there are tensors, or for implausibly many labels.

    A class creates an object for each, which can take minutes and all memory before anything is compared with the
    weights.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            refuse_counts(value, tensors, path)
        most = max(tensors, _LAYERS) if re.search("layers?$", key) else _LABELS if key == "num_labels" else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise ModelError(f"'{path}': {key} is {str(value)[:20]}, for which {tensors} tensors are too few")


def completed(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a configuration with the defaults of its class, and the class's aliases: common name -> its own name."""
    full = CONFIG_MAPPING[given["model_type"]].from_dict(deepcopy(given))
    aliases = dict(getattr(full, "attribute_map", {}))
    names = {new: getattr(full, new, None) for new in aliases}
    return _filled(given, {**full.to_dict(), **names}), aliases


def with_all_else_kept(given: dict[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a configuration together with the settings that its class would derive from them, each with its
    value of before: T5 scales what its decoder returns unless the configuration says that the head is not tied."""
    if not updates or given["model_type"] not in CONFIG_MAPPING:
        return dict(updates)
    before, after = (completed({**given, **changes})[0] for changes in ({}, updates))
    derived = {key: value for key, value in before.items()
               if after.get(key) != value and key not in updates and not isinstance(value, dict)}  # fmt: skip
    return {**derived, **updates}


def _filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a config with defaults for all keys that it lacks, also inside the configs of towers."""
    inner = {key: _filled(value, defaults[key]) for key, value in given.items()
             if isinstance(value, dict) and isinstance(defaults.get(key), dict)
             and key.endswith("_config")}  # fmt: skip
    return {**defaults, **given, **inner}


def built_in(model_type: str) -> bool:
    """Return whether transformers has a model type by itself, not because a program has registered it."""
    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type].__module__.startswith("transformers.")
