# SPDX-License-Identifier: Apache-2.0
"""Reading a model's configuration for a table: values by key, and the conditions of `when`.

    KEY=VALUE, KEY!=VALUE     the config has this value, or not; for a list: one of its items contains it
    KEY[layer]=VALUE, ..!=..  the same for this layer's item of a list in the config
    layer<N, layer>=N         this is one of the first N layers, or a later one (N: a number, or a config key)
    lacks NAME                this block, or the model, has no such tensor

Of several with commas, all must hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


class TableError(ValueError):
    """A table that cannot be read, or a checkpoint that does not fit its table."""


class OtherTensors(TableError):
    """A checkpoint with tensors that its table does not have, in some layers at least, or without some that it has."""


class OtherSizes(TableError):
    """A checkpoint with a tensor whose shape does not fit the sizes on an axis. spaces: the names of those."""

    def __init__(self, text: str, spaces: frozenset[str]) -> None:
        super().__init__(text)
        self.spaces = spaces


@dataclass(frozen=True)
class Condition:
    """The text after a `when`, or (wanted: False) the negation, for `otherwise`."""

    text: str
    wanted: bool = True

    def of(self, layer: int | None = None, lacks: Callable[[str], bool] | None = None) -> bool | None:
        """Return whether it holds, or None if that depends on an argument that is not given. The config must be
        settled."""
        found = [_found(part, layer, lacks) for part in _parts(self.text)]
        return None if None in found and False not in found else (False not in found) == self.wanted

    @property
    def lacking(self) -> list[str]:
        """Return the tensors in its `lacks`."""
        return [found[1] for part in _parts(self.text) if (found := _LACKS.match(part))]


def condition(text: str) -> Condition:
    """Read the text after a `when`. Raises TableError if a part of it is not a condition."""
    for part in _parts(text):
        if not (_LAYER.match(part) or _LACKS.match(part) or re.match(r"[\w.]+(\[layer\])?!?=\S", part)):
            raise TableError(f"'{part}' is not a condition; write 'when KEY=VALUE', 'layer<N' or 'lacks NAME'")
    return Condition(text)


def settled(when: Iterable[Condition], config: Mapping[str, Any]) -> tuple[Condition, ...] | None:
    """Return the conditions that depend on layers and other tensors, with numbers filled in, or None if the config
    excludes them.

    Raises TableError if the config lacks a number of layers.
    """
    found: list[Condition] = []
    for each in when:
        parts = _parts(each.text)
        of_config = [part for part in parts if not any(each.match(part) for each in (_LAYER, _LISTED, _LACKS))]
        so = all(holds(part, config) for part in of_config)
        if so and len(of_config) < len(parts):
            found.append(replace(each, text=", ".join(_counted(p, config) for p in parts if p not in of_config)))
        elif so != each.wanted:
            return None
    return tuple(found)


_LAYER = re.compile(r"layer(<|>=)(\S+)$")
_LISTED = re.compile(r"([\w.]+)\[layer\](!?)=(\S+)$")
_AMONG = re.compile(r"layer (not )?among([ \d]*)$")  # the form of a settled `KEY[layer]=VALUE`
_LACKS = re.compile(r"lacks\s+(\S+)$")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _counted(part: str, config: Mapping[str, Any]) -> str:
    if listed := _LISTED.match(part):
        if not isinstance(items := setting(config, listed[1]), (list, tuple)):
            raise TableError(f"the config lacks '{listed[1]}' (the kind of each layer)")
        here = " ".join(str(layer) for layer, item in enumerate(items) if str(item) == listed[3])
        return f"layer {'not ' * bool(listed[2])}among {here}"
    if not (found := _LAYER.match(part)):
        return part
    if not isinstance(number := lookup(config, [found[2]]), int):
        raise TableError(f"the config lacks '{found[2]}' (which layers have a tensor)")
    return f"layer{found[1]}{number}"


def _found(part: str, layer: int | None, lacks: Callable[[str], bool] | None) -> bool | None:
    if among := _AMONG.match(part):
        return None if layer is None else (str(layer) in among[2].split()) != bool(among[1])
    if found := _LAYER.match(part):
        return None if layer is None else (layer < int(found[2])) == (found[1] == "<")
    return None if lacks is None else lacks(part.removeprefix("lacks ").strip())


def lookup(config: Mapping[str, Any], keys: list[str]) -> Any:
    """Return the first of `keys` that the config has (a number stands for itself), or None."""
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
        if len(values) == 1 and not even:
            return found
        if not all(isinstance(value, (int, float)) for value in values):
            raise TableError(f"'{key}' is not a number in the config")
        for sign, value in zip(words[1::2], values[1:], strict=True):
            if sign == "/" and not value:
                raise TableError(f"'{key}' divides by zero in the config")
            found = found * value if sign == "*" else found / value  # in this order, since classes round down
        return int(found) + int(found) % 2 if even else int(found)
    return None


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a number, or the value of `key` in the config, or of `inner` in `outer` for `outer.inner`; or None.

    Items of a list are numbered: `depths.0`.
    """
    if key.isdigit():
        return int(key)
    found: Any = config
    for word in key.split("."):
        if isinstance(found, Mapping):
            found = found.get(word)
        elif isinstance(found, (list, tuple)) and word.isdigit() and int(word) < len(found):
            found = found[int(word)]
        else:
            return None
    return found


def holds(condition: str, config: Mapping[str, Any]) -> bool:
    """Return whether a `KEY=VALUE` or `KEY!=VALUE` holds for a config, or all of several, separated by commas."""
    if not condition:
        return True
    if "," in condition:
        return all(holds(part, config) for part in _parts(condition))
    key, _, value = condition.partition("=")
    given = setting(config, key.removesuffix("!").strip())
    value = value.strip()
    if isinstance(given, str) and "|" in given:  # a list in an older config
        given = given.split("|")
    is_so = any(value in str(item) for item in given) if isinstance(given, (list, tuple)) else str(given) == value
    return is_so != key.endswith("!")
