# SPDX-License-Identifier: Apache-2.0
"""Small configurations, with the structure of a model type or a model but not its size.

Which numbers of a configuration are sizes, and how they are related, is inferred from their names and from arithmetic
(equal sizes stay equal, heads times their size stays the width), by one set of rules for all model types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, count
from math import lcm
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils.import_utils import is_timm_available

from .configuration import (
    HIDDEN,
    STAGED,
    all_settings,
    configs,
    declared,
    default_config,
    depths_of,
    is_layers,
    is_number,
    is_per_layer,
    is_staged,
    kind_of_number,
    narrowed,
    numbers,
    rotary_shares,
    settings,
)
from .unset import add_missing, fill

VOCABULARY, POSITIONS, GRID, LABELS, CONVOLVED = 67, 40, 4, 3, 64
WIDE = 16  # smaller widths are not changed

_FREE = [10, 14, 22, 26, 34, 38, 46, 50, 58, 62, 70, 74, 82, 86, 94, 98]  # not multiples of the size of a head
_MOST = {"period": 2, "offset": 1, "first": 1, "shared": 2, "experts": 8, "chosen": 2, "groups": 2, "chosen groups": 1,
         "distances": 8, "shared experts": 2, "positions": POSITIONS, "patch": 2, "window": 2, "codes": 64,
         "queries": 5, "frames": 4, "image tokens": 4, "labels": 7}  # fmt: skip
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


# Scalings of positions by tables of the size of a head, or by the length of the text. A class may need any other one.
_SCALINGS = ("dynamic", "longrope", "su", "ntk")


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
    found = _Shrinking(whole, scale or Scale(), decoder).config(whole)
    _settle(found)
    return found


def _settle(config: PretrainedConfig) -> None:
    """Switch off caches and dropout, and choose eager attention and experts, in a configuration and its towers."""
    for each in configs(config):
        for name, value in declared(each).items():
            if type(value) in (int, float) and re.search(r"drop(out|_path)?(_rate|_prob)?$", name):
                setattr(each, name, type(value)(0))
            if name == "use_cache":
                each.use_cache = False
        each._attn_implementation = "eager"
        each._experts_implementation = "eager"


class _Shrinking:
    """The map from the sizes in a configuration and its towers to small ones."""

    def __init__(self, whole: PretrainedConfig, scale: Scale, decoder: bool) -> None:
        self.scale, self.decoder, self.most = scale, decoder, scale.most or {}
        scopes = [all_settings(config) for config in configs(whole)]
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
        cells = {n for scope in scopes for n in numbers(scope.get("groups_width")) if n >= WIDE}
        self.sizes |= {n: n // cell * self.head for cell in cells for n in widths if n % cell == 0}  # as many groups
        least = self.most.get("neurons")
        free = chain(_FREE, range(102, 10**6, 4)) if least is None else range(least, 10**6, 2)
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
        small = self.scope(own, type(config))
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

    def scope(self, own: Mapping[str, Any], cls: Any) -> dict[str, Any]:
        """Return the settings of a configuration with small sizes."""
        scale = self.scale
        heads = self.heads(own)
        depths = {
            n: list(range(n)) if "layers" in scale.kept else _chosen(own, n, self.least(own)) for n in depths_of(own)
        }
        patch = next((n for key, value in own.items() if kind_of_number(key) == "patch" for n in numbers(value)), 1)
        shrinks = re.compile(r"(patch_sizes|(?<!encoder_)strides?)$")  # convolutions shrink the image
        staged = any(map(shrinks.search, own))
        small_patch = min(patch, 2) if "patch" not in scale.kept else patch
        rates = (n for key, n in own.items() if "downsample" in key and is_number(n))
        rate = next(rates, 1)  # of the input of a window
        lists = (own.get(key) for key in STAGED)
        grid: int = max(
            self.most.get("grid", GRID), 2 ** next((len(each) for each in lists if isinstance(each, list | tuple)), 0)
        )
        hidden: int = next((own[key] for key in HIDDEN if is_number(own.get(key))), 0)
        counts: list[tuple[str, int]] = [(key, own[key]) for kind in ("heads", "key heads") for key in own
                  if kind_of_number(key) == kind and is_number(own[key])]  # fmt: skip
        count = counts[0][1] if counts else 0
        multiples: list[int] = [1, *(n for key, n in own.items() if "expand" in key and is_number(n))]
        in_heads = {key: n for key, n in own.items() if kind_of_number(key) == "in head" and is_number(n)}

        def in_head(key: str, n: int) -> int:
            for other, a in in_heads.items():
                if "rope" not in key and other != key and a < n and n - a in in_heads.values():  # a sum of two
                    return self.inner.get(a, a) + self.inner.get(n - a, n - a)
            near = sorted(counts, key=lambda each: each[0].split("_")[0] != key.split("_")[0])
            for times in multiples:
                for _, number_of in near:
                    if n * number_of == times * hidden and hidden in self.sizes and number_of:
                        return times * self.sizes[hidden] // heads.get(number_of, number_of)
            return self.inner.get(n, n)

        def number(key: str, n: int) -> int:
            kind = kind_of_number(key)
            if kind in scale.kept or n < 0:
                return n
            if self.divisor and kind in ("width", "neurons", "in head", "rotary", "heads", "key heads"):
                return n if "heads" in kind or n % self.divisor or n < WIDE else n // self.divisor
            if kind == "rotary":
                whole = hidden // count if count else 0
                head: int = (
                    self.sizes[hidden] // heads.get(count, count) if whole and hidden in self.sizes else self.head
                )
                return head if n >= whole else max(2, head * n // whole // 2 * 2)
            if kind == "in head":
                return in_head(key, n)
            if kind == "shared" and n in depths:
                return len(depths[n])
            if kind == "layers" and any(
                isinstance(own.get(key), list | tuple) and len(own[key]) == n for key in STAGED
            ):
                return n
            if kind == "layers":
                return len(depths[n]) if n in depths else min(n, scale.layers)
            if kind == "patch" and staged:
                return n
            if kind == "window" and patch > 2 and n % patch == 0 and n >= 4 * patch:  # of pixels
                return 4 * small_patch
            if kind == "window" and rate > 1 and n % rate == 0:
                return min(n, 2 * rate)
            if kind == "image" and (staged or patch == 1):
                return min(n, CONVOLVED)
            if kind == "image":
                return small_patch * min(max(n // patch, 1), grid)
            if kind == "upscaling":
                return max(1, n // patch) * small_patch
            if kind == "width" and n != hidden:
                for other, size in in_heads.items():
                    for whose, number_of in counts:
                        if number_of * size == n and key.split("_")[0] == other.split("_")[0] == whose.split("_")[0]:
                            return heads.get(number_of, number_of) * in_head(other, size)
            if is_staged(key, own.get(key)):
                return min(n, 2)
            maps: dict[str, Mapping[int, int]] = {
                "token": self.ids, "vocabulary": self.vocabularies, "heads": heads, "key heads": heads,
                "width": self.sizes, "neurons": self.sizes,
            }  # fmt: skip
            return maps[kind].get(n, n) if kind in maps else min(n, {**_MOST, **self.most}.get(kind, n))

        def value_of(key: str, value: Any) -> Any:
            if isinstance(value, PretrainedConfig):
                return self.config(_of_transformers(value))
            if key == "per_layer_config":
                chosen = next(iter(depths.values()))
                return {place: {name: value_of(name, each) for name, each in value[layer].items()}
                        for place, layer in enumerate(chosen) if layer in value}  # fmt: skip
            if "pinpoints" in key:
                return [[grid * small_patch] * 2]
            if is_number(value):
                return number(key, value)
            if isinstance(value, list | tuple):
                for n, chosen in depths.items():
                    if is_per_layer(value, n):
                        return [value_of(key, value[layer]) for layer in chosen]
                for n, chosen in depths.items():
                    if is_layers(key, value, n):
                        return [place for place, layer in enumerate(chosen) if layer in value]
                if value and all(map(is_number, value)):
                    return [number(key, n) for n in value]  # as in a file
            if isinstance(value, float) and re.search(r"depth_(coefficient|mult)", key):
                return min(value, 1.0)
            if isinstance(value, float) and kind_of_number(key) == "ratio":
                return min(value, float(self.most.get("ratio", value)))
            return deepcopy(value)

        small = {key: value_of(key, value) for key, value in own.items() if key != "_out_indices"}
        outward = "out_hidden_size" if "out_hidden_size" in own else "hidden_size" if "embed_dim" in own else ""
        if outward in own and self.text in self.sizes:  # the tower's output into the text; defaults may disagree
            small[outward] = self.sizes[self.text]
        width = next((small[key] for key in HIDDEN if is_number(small.get(key))), self.unit)
        number_of = next((small[key] for key, _ in counts), 1)
        if scale.filled is not None:
            sizes: dict[str, int] = {
                **_MOST, "in head": width // number_of, "key heads": max(1, number_of // 2), "vocabulary": VOCABULARY,
                "width": width, "neurons": _FREE[0], "layers": 2, "groups": 1, "shared experts": 1,
                **self.most,
            }  # fmt: skip
            fill(small, scale.filled, sizes, cls)
        head = small.get("head_dim")
        head = head if is_number(head) else width // max(number_of, 1)
        for key in ("rope_parameters", "rope_scaling"):
            if key in small:
                small[key] = _rotary(small[key], head, scale.filled is not None)
        return small

    def least(self, own: Mapping[str, Any]) -> int:
        """Return the least number of layers if no list distinguishes them: with a period, or with special first ones,
        enough to have layers of both kinds."""
        periods = any(kind_of_number(key) == "period" and is_number(value) and value > 1 for key, value in own.items())
        outputs = len(own.get("_out_indices") or ())
        first = any(kind_of_number(key) == "first" and is_number(value) and value > 0 for key, value in own.items())
        return max(self.scale.layers, outputs, 4 if periods else 3 if first else 2)


def _of_transformers(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of a backbone that is available: a ResNet instead of one of the missing package timm."""
    if config.model_type != "timm_backbone" or is_timm_available():
        return config
    cls: Any = CONFIG_MAPPING["resnet"]
    found: PretrainedConfig = cls(out_indices=list(vars(config)["_out_indices"]))
    return found


def _per_layer(own: Mapping[str, Any], key: str) -> bool:
    return any(is_per_layer(own[key], n) or is_layers(key, own[key], n) for n in depths_of(own))


def _chosen(own: Mapping[str, Any], depth: int, least: int) -> list[int]:
    """Return the layers of a model that its twin has: the first two of every kind that lists distinguish, or simply the
    first ones."""
    lists = [[str(item) for item in value] for value in own.values() if is_per_layer(value, depth)]
    lists += [
        [str(layer in value) for layer in range(depth)] for key, value in own.items() if is_layers(key, value, depth)
    ]
    if "per_layer_config" in own:
        lists.append([str(own["per_layer_config"].get(layer)) for layer in range(depth)])
    if not lists or "layers" in own:
        return list(range(min(least, depth)))
    kinds: dict[str, list[int]] = {}
    for layer in range(depth):
        kinds.setdefault(str([each[layer] for each in lists]), []).append(layer)
    twice = 2 if len(kinds) < 4 else 1
    found = sorted(layer for layers in kinds.values() for layer in layers[:twice])
    more = (layer for layer in range(depth) if layer not in found)
    while len(found) < min(least, depth):
        found = sorted([*found, next(more)])
    return found


def _rotary(value: Any, head: int, filled: bool) -> Any:
    """Return rotary parameters for heads of another size, without `_SCALINGS`, which do not affect symmetries."""
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(each, Mapping) for each in value.values()):
        return {key: _rotary(each, head, filled) for key, each in value.items()}
    found = dict(value)
    if value.get("rope_type", value.get("type")) in _SCALINGS:
        kept = {key: each for key, each in value.items() if key in ("rope_theta", "partial_rotary_factor")}
        found = {"rope_type": "default", **kept} if "rope_theta" in value else {}
    pairs = int(head * found.get("partial_rotary_factor", 1)) // 2
    for key in ("mrope_section", "xdrope_section"):
        if key in value or (filled and key == "mrope_section" and found):
            found[key] = _shared_out(pairs, value.get(key, [1, 1, 1]))
    return found or None


def _shared_out(total: int, parts: Sequence[int]) -> list[int]:
    """Divide a number in about the ratio of `parts`; equal parts stay equal, and another one gets the rest."""
    found = [total * part // sum(parts) for part in parts]
    alone = [place for place, part in enumerate(parts) if parts.count(part) == 1]
    found[alone[-1] if alone else -1] += total - sum(found)
    return found
