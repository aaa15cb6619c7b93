# SPDX-License-Identifier: Apache-2.0
"""Reading a model's configuration for a table: values by key, and conditions `KEY=VALUE`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def lookup(config: Mapping[str, Any], keys: list[str]) -> Any:
    """The first of `keys` that the config has (a number stands for itself), or None."""
    for choice in keys:
        key, _, condition = choice.partition(" when ")
        if not holds(condition.strip(), config):
            continue
        even = key.startswith("even ")
        words = re.split(r"\s*([*/])\s*", key.removeprefix("even "))
        values = [setting(config, word) for word in words[::2]]
        if None in values:
            continue
        found = values[0]
        for sign, value in zip(words[1::2], values[1:], strict=True):
            found = found * value if sign == "*" else found / value  # in this order, since a class rounds down, too
        found = found if len(values) == 1 else int(found)
        return found + found % 2 if even else found
    return None


def setting(config: Mapping[str, Any], key: str) -> Any:
    """A number, or what the config has under `key`, or under `inner` of `outer` for `outer.inner`; or None."""
    if key.isdigit():
        return int(key)
    outer, _, inner = key.partition(".")
    found = config.get(outer)
    return (found.get(inner) if isinstance(found, Mapping) else None) if inner else found


def holds(condition: str, config: Mapping[str, Any]) -> bool:
    """Whether a `when KEY=VALUE` or `when KEY!=VALUE` is true of a config; of several, with commas, all."""
    if not condition:
        return True
    if "," in condition:
        return all(holds(part.strip(), config) for part in condition.split(","))
    key, _, value = condition.partition("=")
    given = setting(config, key.removesuffix("!").strip())
    value = value.strip()
    if isinstance(given, str) and "|" in given:  # a list in an older config
        given = given.split("|")
    is_so = any(value in str(item) for item in given) if isinstance(given, (list, tuple)) else str(given) == value
    return is_so != key.endswith("!")
