# SPDX-License-Identifier: Apache-2.0
"""Small configurations, with the structure of a model type or a model but not its size.

Which numbers of a configuration are sizes, and how they are related, is inferred from their names and from arithmetic
(equal sizes stay equal, heads times their size stays the width), by one set of rules for all model types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, count
from math import lcm
from typing import Any

from transformers import PretrainedConfig

from .configuration import (
    HIDDEN,
    all_settings,
    configs,
    declared,
    default_config,
    depths_of,
    is_layers,
    is_per_layer,
    is_staged,
    kind_of_number,
    narrowed,
    numbers,
    rotary_shares,
    settings,
    stages_of,
)
from .small_settings import FREE, VOCABULARY, WIDE, SmallSettings, runnable_config
from .unset import add_missing

LABELS = 3
_PRIMES = [23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113]


@dataclass(frozen=True)
class Scale:
    """The size of a twin. head: of a head. layers: their number, unless a list determines it. heads: the number of key
    and value heads, where there are more query heads. kept: kinds of numbers that are not changed."""

    head: int = 6
    layers: int = 2
    heads: int = 2
    kept: frozenset[str] = frozenset()
    divisor: int | None = None  # divide all widths by this, to preserve sums and ratios, and keep the number of heads
    filled: Mapping[str, int | None] | None = None  # set sizes that are not set, and these settings, see `fill`
    most: Mapping[str, int] | None = None  # kind of number -> its limit, if not the usual one


def twin_config(
    config: PretrainedConfig | str, scale: Scale | None = None, *, decoder: bool = False
) -> PretrainedConfig:
    """Return a configuration of the same structure with small sizes.

    Args:
        config: A configuration, or a model type, for its default configuration.
        scale: The size of the twin.
        decoder: Whether to set `is_decoder`, if the class has it.

    Raises:
        ValueError: The class refuses the small sizes.
    """
    whole = default_config(config) if isinstance(config, str) else config
    found = Shrinking(whole, scale or Scale(), decoder).config(whole)
    _settle(found, _image(found) / max(_image(whole), 1))
    return found


def _settle(config: PretrainedConfig, zoom: float) -> None:
    """Switch off caches and dropout, choose eager attention and experts, let an image be one tile and maps of its
    features be as much smaller as it is, in a configuration and its towers."""
    image = _image(config)
    for each in configs(config):
        if "image_grid_pinpoints" in vars(each):
            each.image_grid_pinpoints = [[image, image]]
        for name, value in declared(each).items():
            if type(value) in (int, float) and re.search(r"drop(out|_path)?(_rate|_prob)?$", name):
                setattr(each, name, type(value)(0))
            if name.endswith("feature_sizes"):
                setattr(each, name, [[int(n * zoom) for n in numbers(sizes)] for sizes in value])
            if name == "use_cache":
                each.use_cache = False
        each._attn_implementation = "eager"
        each._experts_implementation = "eager"


def _image(config: PretrainedConfig) -> int:
    """Return the size of the images that a configuration or a tower of it states, 0 if none does."""
    return next((n for each in configs(config) for n in numbers(vars(each).get("image_size"))), 0)


class Shrinking:
    """The map from the sizes in a configuration and its towers to small ones."""

    def __init__(self, whole: PretrainedConfig, scale: Scale, decoder: bool) -> None:
        self.scale, self.decoder, self.most = scale, decoder, scale.most or {}
        scopes = [all_settings(runnable_config(config)) for config in configs(whole)]
        self.text = getattr(whole.get_text_config(), "hidden_size", 0) if len(scopes) > 1 else 0
        self.divisor = scale.divisor and min(narrowed(scale.divisor, scope) for scope in scopes)
        shares = {share for scope in scopes for share in rotary_shares(scope)}
        sight = any(kind_of_number(key) == "patch" for scope in scopes for key in scope)
        self.head = scale.head
        if sight and scale.head > 4:  # one half may be rotated by rows, the other by columns
            self.head = max(scale.head, 8)
        while any(int(self.head * share) < 2 or int(self.head * share) % 2 for share in shares) and self.head < 32:
            self.head += 2

        def of(*kinds: str) -> list[int]:
            return sorted({n for scope in scopes for key, value in settings(scope) if kind_of_number(key) in kinds
                           for n in numbers(value) if n >= WIDE})  # fmt: skip

        counts = {count for scope in scopes for count in self.heads(scope).values()}
        self.unit = self.head * lcm(*counts) if counts else self.head * 4
        widths = of("width")
        bins = {n for scope in scopes for key, value in settings(scope) if kind_of_number(key) == "bins"
                for n in numbers(value)}  # fmt: skip
        bins -= {n for scope in scopes for key in HIDDEN for n in numbers(scope.get(key))}
        widths = [n for n in widths if n not in bins]  # these stay
        neurons = [n for n in of("neurons") if n not in widths]
        shared = lcm(*counts)
        self.sizes = {n: self.unit * place if n > self.unit * place or n % shared else n
                      for place, n in enumerate(widths, 1)}  # fmt: skip
        if "width" in self.most:  # only streams are divided into heads
            streams = {n for scope in scopes for key in HIDDEN for n in numbers(scope.get(key))} & set(widths)
            self.sizes = {n: self.unit * place for place, n in enumerate(sorted(streams), 1)}
            narrow = count(self.most["width"], 2)
            for n in widths:
                wider = [m for m in streams if n % m == 0]
                self.sizes.setdefault(n, n // max(wider) * self.sizes[max(wider)] if wider else next(narrow))
        for scope in scopes:  # widths that double from stage to stage, up to the stream's
            times, stream = 2 ** (next(iter(stages_of(scope)), 1) - 1), scope.get("hidden_size")
            if times > 1 and stream in widths and stream % times == 0 and stream // times in widths:
                self.sizes[stream] = times * self.sizes[stream // times]
        cells = {n for scope in scopes for n in numbers(scope.get("groups_width")) if n >= WIDE}
        self.sizes |= {n: n // cell * self.head for cell in cells for n in widths if n % cell == 0}  # as many groups
        least = self.most.get("neurons")
        free = chain(FREE, range(102, 10**6, 4)) if least is None else range(least, 10**6, 2)
        self.sizes |= dict(zip(neurons, free, strict=False))
        self.inner = {n: self.head * place for place, n in enumerate(of("in head"), 1)}
        smallest = self.most.get("vocabulary", VOCABULARY)
        if "vocabulary" in self.most:  # more tokens than the width of any stream
            smallest = max([smallest, *(n + 1 for n in self.sizes.values())])
        primes = [n for n in _PRIMES if n >= smallest]
        self.vocabularies = dict(zip([n for n in of("vocabulary") if n > smallest], primes, strict=False))
        tokens = sorted({n for scope in scopes for key, value in settings(scope) if kind_of_number(key) == "token"
                         for n in numbers(value) if n >= smallest // 2})  # fmt: skip
        self.ids = {n: smallest - len(tokens) + place for place, n in enumerate(tokens)}

    def heads(self, scope: Mapping[str, Any]) -> dict[int, int]:
        """Return the small numbers of heads: groups of at least two stay groups, with at most four times as many heads
        as the smallest number."""
        counts = sorted({n for key, value in scope.items() if kind_of_number(key) in ("heads", "key heads")
                         and not is_staged(key, value) for n in numbers(value) if n > 1})  # fmt: skip
        few = self.scale.heads
        if "heads" in self.scale.kept:
            return {n: n for n in counts}
        if len(counts) == 1:
            return {counts[0]: min(counts[0], 2 * few) if counts[0] % 4 == 0 else min(counts[0], few)}
        return {n: few * 2 ** min(place, 2) for place, n in enumerate(counts)}

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        own = all_settings(config)
        small = SmallSettings(self, own).small(type(config))
        derived = self.derived(config, own) if self.scale.filled is None else set()
        given = {name: value for name, value in small.items() if name not in derived}
        if self.decoder and "is_decoder" in given:
            given["is_decoder"] = True
        count = getattr(config, "num_labels", None)
        labels: Any = {} if count is None else {"num_labels": self.most.get("labels") or min(count, LABELS)}
        found = type(config)(**given, **labels)
        fixed = {name for name in derived & small.keys() if small[name] != own[name] == getattr(found, name, None)}
        if fixed:  # they do not depend on the others
            given |= {name: small[name] for name in fixed}
            found = type(config)(**given, **labels)
        wanted, stages = vars(config).get("_out_indices"), len(vars(found).get("stage_names") or ())
        if wanted and stages:  # a backbone: the same stages, or the last ones
            same = stages == len(vars(config)["stage_names"])
            indices = list(wanted) if same else list(range(stages))[-len(wanted) :]
            cls: Any = type(config)
            found = cls(**given, **labels, out_indices=indices)
        if self.scale.filled and type(config).__name__ in self.scale.filled:
            add_missing(found, self.scale.filled, small.get("num_attention_heads", 2))
        return found

    def derived(self, config: PretrainedConfig, own: Mapping[str, Any]) -> set[str]:
        """Return the settings that the class derives from others, except for lists with an entry per layer."""
        cls = type(config)
        if not is_dataclass(cls):
            return set()
        none = {each.name for each in fields(cls) if each.default is None}
        unset = {name for name, value in own.items() if name in none and value is not None
                 and not isinstance(value, PretrainedConfig) and not _per_layer(own, name)}  # fmt: skip
        if not unset:
            return set()
        try:
            again = cls(**deepcopy({name: value for name, value in own.items() if name not in unset}))
        except Exception:  # the class needs them
            return set()
        return {name for name in unset if getattr(again, name, None) == own[name]
                and kind_of_number(name) not in ("vocabulary", "token")}  # fmt: skip


def _per_layer(own: Mapping[str, Any], key: str) -> bool:
    return any(is_per_layer(own[key], n) or is_layers(key, own[key], n) for n in depths_of(own))
