# SPDX-License-Identifier: Apache-2.0
"""Values for the sizes that a configuration leaves unset, or that its class reads but does not declare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import PretrainedConfig

from .configuration import is_number, kind_of_number, words_of_layers

ALL = "*"  # as the name of a setting: every number that is not set


def fill(small: dict[str, Any], named: Mapping[str, int | None], sizes: Mapping[str, int], cls: Any) -> None:
    """Set sizes that are not set, kinds of layers without a list, and rotary parameters that these need.

    Args:
        small: The settings of a small configuration, which are changed.
        named: Settings to set to these values, or, if None, to the size of their kind; `ALL` for all numbers.
        sizes: Kind of number -> size.
        cls: The class of the configuration.
    """
    typed = {each.name: str(each.type) for each in fields(cls)} if is_dataclass(cls) else {}
    ids = iter(range(1, sizes["vocabulary"]))
    for key, value in small.items():
        kind = kind_of_number(key)
        if value is None and (kind in {*sizes, "token"} or key in named) and "int" in typed.get(key, "int"):
            size = next(ids) if kind == "token" else sizes.get(kind, 2)
            small[key] = named.get(key) or size
        elif value is None and ALL in named and re.search("int|float", typed.get(key, "")):
            small[key] = 8.0 if "float" in typed[key] else 2
        elif named.get(key) is not None and is_number(value):
            small[key] = named[key]
    depth = next((small[key] for key in ("num_hidden_layers", "n_layers") if key in small), 2)
    for key in small.keys() & {"layer_types", "mlp_layer_types"}:
        words = words_of_layers(cls, "MLP" if "mlp" in key else "ATTN")
        if not small[key] and words:
            small[key] = [words[place % len(words)] for place in range(depth)]
    if named.keys() & set(small.get("layer_types") or ()) and not small.get("rope_parameters"):
        rotary = {"rope_type": "default", "rope_theta": 1e4}
        small["rope_parameters"] = {word: dict(rotary) for word in small["layer_types"]}


def add_missing(config: PretrainedConfig, names: Mapping[str, int | None], heads: int) -> None:
    """Set numbers that a class reads but does not declare, by what their names say."""
    for name in names:
        if name.islower() and not hasattr(config, name):
            setattr(config, name, 1e4 if "theta" in name else 0.0 if "drop" in name else heads if "head" in name else 2)
