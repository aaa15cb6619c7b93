# SPDX-License-Identifier: Apache-2.0
"""The keys of a configuration that state the sizes of spaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from transformers import PreTrainedModel

from onebasin.running.configuration import ASIDE, kind_of_number, nested

# Name of a space -> pattern of the keys that may state its size.
NAMED = {
    "head": r"head", "group": r"group", "expert": r"expert|local", "ffn": r"inter|ffn|inner|mlp", "rope": r"rope|rot",
    "vo": r"v_head|head_dim|head_size|d_kv", "qk": r"head_dim|head_size|d_kv|qk",
}  # fmt: skip
WIDTHS = r"hidden_size|d_model|n_embd|embed_dim|dim$|\bwidth$|head_dim|head_size|d_kv"
IN_HEADS = ("vo", "qk", "rope")
OF_HEADS = ("head", "group", *IN_HEADS)
COUNTED = ("heads", "key heads", "head groups", "groups", "experts", "chosen", "layers")  # kinds that are no widths


def key_of_size(name: str, sizes: tuple[int, ...], configs: Sequence[Mapping[str, Any]], scope: str = "") -> str | None:
    """Return the expression for the size of a space, given its sizes under several configurations.

    This is a key with these values, chosen by its name if there are several, else a number if the sizes are all equal,
    else the simplest product or quotient of keys.

    scope: of a nested configuration (`outer.inner`), whose keys come first: towers may agree in twins alone.
    """
    return next(expressions(name, sizes, configs, scope), None)


def expressions(
    name: str, sizes: tuple[int, ...], configs: Sequence[Mapping[str, Any]], scope: str = ""
) -> Iterator[str]:
    """Yield the expressions among which `key_of_size` chooses, the most suitable first."""
    flat = [dict(_numbers_of(config)) for config in configs]
    own = [{key: value for key, value in each.items() if key.startswith(f"{scope}.")} for each in flat]
    for numbers in [own, flat] if scope else [flat]:
        yield from _expressions(name, sizes, numbers)
    if len(sizes) > 1 and len(set(sizes)) == 1 and _word(name) not in IN_HEADS:  # heads may be larger than in both
        yield str(sizes[0])


def _expressions(name: str, sizes: tuple[int, ...], flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the expressions from numbers of several configurations, the best first."""
    numbers = {key: tuple(each[key] for each in flat) for key in flat[0] if all(key in each for each in flat)}
    whole: dict[str, tuple[int, ...]] = {
        key: values for key, values in numbers.items() if all(type(value) is int and value > 0 for value in values)
    }
    factors = {key: values for key, values in whole.items() if _kind(key) != "layers"}
    word = _word(name)
    wanted = NAMED.get(word, r".")
    changing = len(set(sizes)) > 1
    alike = not changing and len(sizes) > 1
    by_chance = alike and word not in NAMED  # a kernel has as many numbers as there are heads
    ranked = [key for key, values in whole.items()
              if values == sizes and not by_chance and (changing or re.search(wanted, key))]  # fmt: skip
    ranked.sort(key=lambda key: (not re.search(wanted, key), "head" in name and bool(re.search("key_value|kv", key)),
                                 _kind(key) != "head groups", "." in key))  # fmt: skip
    if word in IN_HEADS:  # agreement with a number of heads is chance
        ranked = [key for key in ranked if _kind(key) not in COUNTED]
    if word == "ffn":  # and so it is with a part of a head, or any quotient
        return [key for key in ranked if _kind(key) != "in head"]
    depths = [key for key in ranked if key not in factors]  # numbers of layers, which are hardly sizes of anything else
    ranked = [key for key in ranked if key in factors]
    if ranked and (word not in IN_HEADS or re.search(wanted, ranked[0])):
        return ranked
    if found := sorted(_shares_of(sizes, numbers, whole), key=len) or ranked:
        return found
    found = []
    for a, n in factors.items():
        for b, m in factors.items():
            if a != b and all(x == y * size for x, y, size in zip(n, m, sizes, strict=True)):
                found.append(f"{a} / {b}")
            if a < b and changing and all(x * y == size for x, y, size in zip(n, m, sizes, strict=True)):
                found.append(f"{a} * {b}")
        ratios = {Fraction(size, x) for x, size in zip(n, sizes, strict=True)}
        if len(ratios) == 1 and changing:
            ratio = ratios.pop()
            if min(ratio.numerator, ratio.denominator) == 1 and max(ratio.numerator, ratio.denominator) < 9:
                found.append(f"{a} * {ratio.numerator}" if ratio > 1 else f"{a} / {ratio.denominator}")
    words = WIDTHS if word in IN_HEADS else {"head": "head", "group": "head|group"}.get(word, ".")
    found.sort(key=lambda text: (not re.search(words, text), not re.search(WIDTHS, text.split(" ")[0]),
                                 not re.search(r"/ \S*(groups?|heads)$", text), len(text)))  # fmt: skip
    if word in IN_HEADS:  # so is half of something, or a third
        found = [text for text in found if re.search(WIDTHS, text.split(" ")[0]) and not re.search(r" \d+$", text)]
    if alike:
        found = [text for text in found[:1] if re.search("head", text) and word in OF_HEADS]
    return found + depths


def _word(name: str) -> str:
    """Return the name of a space without its number."""
    return re.sub(r"\d+$", "", name)


def _kind(key: str) -> str:
    """Return the kind of number that a key states, which may be in a nested configuration."""
    return kind_of_number(key.split(".")[-1])


def _shares_of(
    sizes: tuple[int, ...], numbers: Mapping[str, tuple[Any, ...]], whole: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield expressions for these sizes as the share of a head that rotary embeddings rotate."""
    for share, parts in numbers.items():
        if not re.search(r"rotary|rope", share) or not all(type(part) is float and part < 1 for part in parts):
            continue
        for a, n in whole.items():
            bodies = [(a, n)]
            bodies += [(f"{a} / {b}", tuple(x // y for x, y in zip(n, m, strict=True))) for b, m in whole.items()
                       if re.search("head", b) and all(x % y == 0 for x, y in zip(n, m, strict=True))]  # fmt: skip
            for body, each in bodies:
                turned = [(int(x * y) + 1) // 2 * 2 for x, y in zip(each, parts, strict=True)]
                if turned == list(sizes) and re.search("head", body):
                    yield f"even {body} * {share}"


def scope_of(model: PreTrainedModel, parameters: Iterable[str]) -> str:
    """Return the place of the configuration that the innermost modules with these parameters have, `outer.inner`; an
    empty string if it is that of the whole model, or if they have several."""
    places = {id(config): place for place, config in nested(model.config)}
    found = set[str]()
    for parameter in parameters:
        held = [getattr(model.get_submodule(path), "config", None) for path in _ancestors(parameter)]
        found.add(next((places[id(config)] for config in held if id(config) in places), ""))
    return found.pop() if len(found) == 1 else ""


def _ancestors(parameter: str) -> Iterator[str]:
    """Yield the names of the modules that a parameter is in, the innermost first."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        yield parameter


def list_of_layers(kinds: Sequence[str], config: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Return the list of a configuration whose items, one for each layer, distinguish these kinds, with its items. None
    if there are several, since it is not known which of them a larger model follows."""
    found = []
    for key, value in _lists_of(config):
        items = [str(item) for item in value]
        distinct = len(set(zip(items, kinds, strict=False))) == len(set(items))
        if len(items) == len(kinds) and distinct and all(re.fullmatch(r"[\w.-]+", item) for item in items):
            found.append((key, items))
    return found[0] if len(found) == 1 else None


def _lists_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield keys and lists, with keys `outer.inner` for a nested configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", each) for name, each in _lists_of(value))
        elif isinstance(value, (list, tuple)):
            yield key, value


def _numbers_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, with keys `outer.inner` for a nested configuration or list. Numbers of classes are no
    sizes."""
    for key, value in config.items():
        if key in ASIDE:
            continue
        if isinstance(value, (Mapping, list, tuple)):
            inner = value if isinstance(value, Mapping) else {str(place): each for place, each in enumerate(value)}
            yield from ((f"{key}.{name}", each) for name, each in _numbers_of(inner))
        else:
            yield key, value
