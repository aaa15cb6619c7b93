# SPDX-License-Identifier: Apache-2.0
"""Tables of configurations, each inferred once and cached with its proof."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from onebasin.engine import Cache
from onebasin.models import ModelError
from onebasin.models.configuration import built_in
from onebasin.running.classes import exported
from onebasin.symmetry import Table, TableError

from .search import Inferred, infer

UNSEEN = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")  # of no effect on a table


def of_config(config: Mapping[str, Any]) -> Inferred:
    """Infer the table of a configuration, given as in config.json. It is cached with its proof for later commands,
    unless the type is none of those of transformers.

    Raises:
        ModelError: transformers does not know the type, or no exact table was found; the first reason is named.
    """
    stated = config.get("architectures")
    named = next(filter(exported, stated if isinstance(stated, list) else ()), "")
    seen = {key: value for key, value in config.items() if key not in UNSEEN}
    return _of_config(json.dumps([named, seen], sort_keys=True))


@cache
def _of_config(unit: str) -> Inferred:
    named, config = json.loads(unit)
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__} does not know the model type '{kind}'")
    whole = CONFIG_MAPPING[kind].from_dict(config)
    if not built_in(kind):  # a program has registered it, and may change its class
        return infer(whole, named or None)
    store = Cache(_code())
    if known := store.find(unit):
        return Inferred.of(**known)
    found = infer(whole, named or None)
    store.put(unit, {"text": found.text, "facts": found.facts})
    return found


@cache
def _code() -> str:
    """Return what a table and its proof depend on besides the configuration: this package, torch and transformers."""
    package = Path(__file__).parents[2]
    ours = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        ours.update(path.read_bytes())
    return json.dumps([ours.hexdigest(), str(torch.__version__), transformers.__version__])


def table_of(config: Mapping[str, Any]) -> Table:
    """Return the table inferred for a configuration, given as in config.json.

    Raises:
        TableError: transformers does not know the type, or no exact table was found; the first reason is named.
    """
    try:
        return of_config(config).table
    except ModelError as error:
        raise TableError(str(error)) from None
