# SPDX-License-Identifier: Apache-2.0
"""The small values that the settings of a configuration take in a twin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils.import_utils import is_timm_available

from .configuration import (
    HIDDEN,
    depths_of,
    is_layers,
    is_number,
    is_per_layer,
    is_staged,
    kind_of_number,
    numbers,
    stages_of,
)
from .unset import fill

if TYPE_CHECKING:
    from .shrinking import Shrinking

VOCABULARY, POSITIONS, GRID, CONVOLVED = 67, 40, 4, 64
WIDE = 16  # smaller widths are not changed
MULTIPLIED, NARROWER = "width_coefficient", 8  # by which a class multiplies its widths, and what divides it in a twin

FREE = [10, 14, 22, 26, 34, 38, 46, 50, 58, 62, 70, 74, 82, 86, 94, 98]  # not multiples of the size of a head
_MOST = {"period": 2, "offset": 1, "first": 1, "shared": 2, "experts": 8, "chosen": 2, "groups": 2, "chosen groups": 1,
         "distances": 8, "shared experts": 2, "positions": POSITIONS, "patch": 2, "window": 2, "codes": 64,
         "queries": 5, "frames": 4, "image tokens": 4, "labels": 7, "chunk": 8, "local": 4}  # fmt: skip

# Scalings of positions by tables of the size of a head, or by the length of the text. A class may need any other one.
_SCALINGS = ("dynamic", "longrope", "su", "ntk")


class SmallSettings:
    """The settings of one configuration, the whole or a tower, and what each becomes in a twin.

    heads: number of heads -> the small one. depths: number of layers -> those that the twin has.
    """

    def __init__(self, plan: Shrinking, own: Mapping[str, Any]) -> None:
        self.plan, self.own, self.scale = plan, own, plan.scale
        self.heads = plan.heads(own)
        self.depths = {
            n: list(range(n)) if "layers" in self.scale.kept else _chosen(own, n, self.least()) for n in depths_of(own)
        }
        self.hidden: int = next((own[key] for key in HIDDEN if is_number(own.get(key))), 0)
        self.counts: list[tuple[str, int]] = [(key, own[key]) for kind in ("heads", "key heads") for key in own
                       if kind_of_number(key) == kind and is_number(own[key])]  # fmt: skip
        self.in_heads = {key: n for key, n in own.items() if kind_of_number(key) == "in head" and is_number(n)}
        self.multiplied: bool = self.own.get(MULTIPLIED, 0) >= 1  # and not a twin already
        self.multiples: list[int] = [1, *(n for key, n in own.items() if "expand" in key and is_number(n))]

        self.patch = next(
            (n for key, value in own.items() if kind_of_number(key) == "patch" for n in numbers(value)), 1
        )
        self.small_patch = min(self.patch, 2) if "patch" not in self.scale.kept else self.patch
        self.staged = any(re.search(r"(patch_sizes|(?<!encoder_)strides?)$", key) for key in own)  # shrinks the image
        self.rate = next((n for key, n in own.items() if "downsample" in key and is_number(n)), 1)  # before a window
        self.stages = stages_of(own)
        self.grid: int = max(plan.most.get("grid", GRID), 2 ** next(iter(self.stages), 0))

    def least(self) -> int:
        """Return the least number of layers if no list distinguishes them: with a period, or with special first ones,
        enough to have layers of both kinds."""

        def some(kind: str, least: int) -> bool:
            return any(kind_of_number(key) == kind and is_number(n) and n > least for key, n in self.own.items())

        outputs = len(self.own.get("_out_indices") or ())
        return max(self.scale.layers, outputs, 4 if some("period", 1) else 3 if some("first", 0) else 2)

    def small(self, cls: Any) -> dict[str, Any]:
        """Return the settings of a twin. cls: their class, which knows what may be unset."""
        own, scale, plan = self.own, self.scale, self.plan
        found = {key: self.value(key, value) for key, value in own.items() if key != "_out_indices"}
        outward = "out_hidden_size" if "out_hidden_size" in own else "hidden_size" if "embed_dim" in own else ""
        if is_number(own.get("output_dim")) and own["output_dim"] > self.hidden:  # not its classes
            outward = "output_dim"
        if outward in own and plan.text in plan.sizes:  # the tower's output into the text; defaults may disagree
            found[outward] = plan.sizes[plan.text]
        width = next((found[key] for key in HIDDEN if is_number(found.get(key))), plan.unit)
        heads = next((found[key] for key, _ in self.counts), 1)
        if scale.filled is not None:
            sizes: dict[str, int] = {
                **_MOST, "in head": width // heads, "key heads": max(1, heads // 2), "vocabulary": VOCABULARY,
                "width": width, "neurons": FREE[0], "layers": 2, "groups": 1, "shared experts": 1, **plan.most,
            }  # fmt: skip
            fill(found, scale.filled, sizes, cls)
        head = found.get("head_dim")
        head = head if is_number(head) else width // max(heads, 1)
        for key in ("rope_parameters", "rope_scaling"):
            if key in found:
                found[key] = _rotary(found[key], head, scale.filled is not None)
        return found

    def value(self, key: str, value: Any) -> Any:
        """Return what a setting becomes."""
        if isinstance(value, PretrainedConfig):
            return self.plan.config(runnable_config(value))
        if key == "per_layer_config":
            chosen = next(iter(self.depths.values()))
            return {place: {name: self.value(name, each) for name, each in value[layer].items()}
                    for place, layer in enumerate(chosen) if layer in value}  # fmt: skip
        if is_number(value):
            return self.number(key, value)
        if isinstance(value, list | tuple):
            for n, chosen in self.depths.items():
                if is_per_layer(value, n):
                    return [self.value(key, value[layer]) for layer in chosen]
            for n, chosen in self.depths.items():
                if is_layers(key, value, n):
                    return [place for place, layer in enumerate(chosen) if layer in value]
            if value and all(map(is_number, value)):
                return [self.number(key, n) for n in value]  # as in a file
        if isinstance(value, float) and re.search(r"depth_(coefficient|mult)", key) and "layers" not in self.scale.kept:
            return min(value, 1.0)
        if key == MULTIPLIED and self.multiplied:
            return value / NARROWER
        if isinstance(value, float) and kind_of_number(key) == "ratio":
            return min(value, float(self.plan.most.get("ratio", value)))
        return deepcopy(value)

    def number(self, key: str, n: int) -> int:
        """Return what a number becomes."""
        kind, plan, depths = kind_of_number(key), self.plan, self.depths
        if kind in self.scale.kept or n < 0:
            return n
        if kind == "width" and self.multiplied:  # by its class, but for the last
            return n // NARROWER if key == "hidden_dim" else n
        if plan.divisor and kind in ("width", "neurons", "in head", "rotary", "heads", "key heads"):
            return n if "heads" in kind or n % plan.divisor or n < WIDE else n // plan.divisor
        if kind == "rotary":
            return self.rotary(n)
        if kind == "in head":
            return self.in_head(key, n)
        if kind == "shared" and n in depths:
            return len(depths[n])
        if kind == "layers" and n in self.stages:
            return n
        if kind == "head groups":
            return self.head_groups(n)
        if kind == "layers":
            return len(depths[n]) if n in depths else min(n, self.scale.layers)
        if kind in ("patch", "window", "image", "upscaling") and (found := self.pixels(kind, n)) is not None:
            return found
        if kind == "width" and n != self.hidden and (found := self.all_heads(key, n)) is not None:
            return found
        if is_staged(key, self.own.get(key)):
            return min(n, 2)
        maps: dict[str, Mapping[int, int]] = {
            "token": plan.ids, "vocabulary": plan.vocabularies, "heads": self.heads, "key heads": self.heads,
            "width": plan.sizes, "neurons": plan.sizes,
        }  # fmt: skip
        return maps[kind].get(n, n) if kind in maps else min(n, {**_MOST, **plan.most}.get(kind, n))

    def pixels(self, kind: str, n: int) -> int | None:
        """Return what a size of images becomes, None if the general rules hold."""
        if kind == "patch":
            return n if self.staged else None
        if kind == "window":
            if self.patch > 2 and n % self.patch == 0 and n >= 4 * self.patch:
                return 4 * self.small_patch
            return min(n, 2 * self.rate) if self.rate > 1 and n % self.rate == 0 else None
        if kind == "upscaling":
            return max(1, n // self.patch) * self.small_patch
        if self.staged or self.patch == 1:
            return min(n, CONVOLVED)
        return self.small_patch * min(max(n // self.patch, 1), self.grid)

    def rotary(self, n: int) -> int:
        """Return how many coordinates of a head turn: as large a share, in pairs."""
        sizes, count = self.plan.sizes, self.counts[0][1] if self.counts else 0
        whole = self.hidden // count if count else 0
        head: int = (
            sizes[self.hidden] // self.heads.get(count, count) if whole and self.hidden in sizes else self.plan.head
        )
        return head if n >= whole else max(2, head * n // whole // 2 * 2)

    def in_head(self, key: str, n: int) -> int:
        """Return what a size inside a head becomes: still the sum of two others, or the share of the width."""
        plan, hidden = self.plan, self.hidden
        for other, a in self.in_heads.items():
            if "rope" not in key and other != key and a < n and n - a in self.in_heads.values():
                return plan.inner.get(a, a) + plan.inner.get(n - a, n - a)
        near = sorted(self.counts, key=lambda each: each[0].split("_")[0] != key.split("_")[0])
        for times in self.multiples:
            for _, heads in near:
                if n * heads == times * hidden and hidden in plan.sizes and heads:
                    return times * plan.sizes[hidden] // self.heads.get(heads, heads)
        return plan.inner.get(n, n)

    def head_groups(self, n: int) -> int:
        """Return how many groups share the keys of a state-space layer: a divisor of its heads, which are the most, and
        in some twin not as many as key and value heads."""
        count = max((count for _, count in self.counts), default=n)
        heads = self.heads.get(count, count)
        most = min(n, max(1, 2 * self.scale.heads - 2))
        return max(g for g in range(1, most + 1) if heads % g == 0)

    def all_heads(self, key: str, n: int) -> int | None:
        """Return what the width of all heads together becomes, None if it is another width."""
        first = key.split("_")[0]
        for other, size in self.in_heads.items():
            for whose, heads in self.counts:
                if heads * size == n and first == other.split("_")[0] == whose.split("_")[0]:
                    return self.heads.get(heads, heads) * self.in_head(other, size)
        return None


def runnable_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of a backbone that is available: a ResNet instead of one of the missing package timm."""
    if config.model_type != "timm_backbone" or is_timm_available():
        return config
    cls: Any = CONFIG_MAPPING["resnet"]
    found: PretrainedConfig = cls(out_indices=list(vars(config)["_out_indices"]))
    return found


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
