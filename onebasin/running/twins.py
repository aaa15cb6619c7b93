# SPDX-License-Identifier: Apache-2.0
"""Tiny twins: a model of any type that `transformers` knows, from its configuration alone.

A twin has the structure of its model and nothing of its size: few and small layers, random parameters, float64. Which
numbers of a configuration are sizes, and which go together, is told from their names and from arithmetic between them
(equal ones stay equal, heads times their size stays the width): one set of rules for all model types. Where a class
refuses what they give, other scales are tried, and then one kind of number after another is left as it was.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import chain
from math import lcm, prod, sqrt
from typing import Any, TypeGuard

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from onebasin.models import ModelError
from onebasin.models.folder import one_line

from .expert_layout import one_by_one
from .float64 import Float64
from .verification import _quietly

VOCABULARY, POSITIONS, GRID, LABELS = 67, 40, 4, 3
BATCH, LENGTH, FRAMES = 3, 13, 5
LARGEST = 20_000_000  # parameters of a twin that some number keeps large
WIDE = 16  # smaller widths are left

# What the numbers of a configuration are, by name; the first that fits counts.
RULES = {
    "token": r"(_token|_token_id|_token_ids|_token_index)$",
    "codes": r"codebook_size$",
    "vocabulary": r"vocab",
    "offset": r"layer_offset$",
    "period": r"(every_n|interval|pattern$|layer_period|sparse_step|frequency$|layer_step)",
    "first": r"(first_k|num_dense_layers)",
    "shared": r"shared_layers$",
    "upscaling": r"^encoder_stride$",
    "still": r"(feat_extract|kernel|stride|padding|dilation|(num|in|input|audio)_channels$|scalar|mel_bins|"
             r"shared_experts|layer_norm|_fft|chunk|ngram|temperature|merge|seconds|per_token|layer_freq|max_window|feature_layer)",
    "layers": r"(^|_)(n_)?(layers?|depths?|blocks)$",
    "in head": r"(head_dim|head_size|d_kv|d_head|dim_head|headdim)$",
    "key heads": r"(key_value_heads|kv_heads|n_head_kv|kv_n_heads)$",
    "heads": r"(^|_)(n_)?heads?(_per_layer|_per_stage)?$",
    "experts": r"(^|_)(experts|expert_num)$",
    "chosen": r"(experts_per_tok(en)?|moe_top_?k|moe_k)$",
    "chosen groups": r"topk_group$",
    "groups": r"(^n_group|_groups?|group_num)$",
    "distances": r"(bucket|relative|max_distance|codevectors)",
    "positions": r"(position|n_ctx|max_seq_len|seq_length|max_pos|block_size)",
    "image": r"(^|_)image_size$",
    "patch": r"(^|_)patch_sizes?$",
    "window": r"window_sizes?$",
    "rotary": r"rotary_(dim|ndims)$",
    "neurons": r"(intermediate|ffn|mlp|inner|d_ff|feed_?forward)",
    "width": r"(size|sizes|dims?|width|rank|d_model|n_embd|embed|channels?|units|filters|features|dim_per_stage|"
             r"d_state|d_ssm|latents)$",
}  # fmt: skip
_ASIDE = {"transformers_version", "id2label", "label2id", "num_labels", "dtype", "torch_dtype", "problem_type",
          "stage_names", "out_features", "out_indices", "_out_features", "_out_indices", "return_dict",
          "output_hidden_states", "output_attentions"}  # fmt: skip
_FREE = [10, 14, 22, 26, 34, 38, 46, 50, 58, 62, 70, 74, 82, 86, 94, 98]  # no multiples of a head
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width")
_MOST = {"period": 2, "offset": 1, "first": 1, "shared": 2, "experts": 8, "chosen": 2, "groups": 2, "chosen groups": 1,
         "distances": 8, "positions": POSITIONS, "patch": 2, "window": 2, "codes": 64}  # fmt: skip
_LEFT = ("image", "patch", "window", "positions", "distances", "heads", "groups", "layers", "in head", "neurons",
         "vocabulary", "width")  # fmt: skip
_PRIMES = [67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113]


@cache
def kind_of_number(name: str) -> str:
    """Return what a number of a configuration is, by its name: a key of `RULES`, or nothing."""
    return next((kind for kind, pattern in RULES.items() if re.search(pattern, name)), "")


@dataclass(frozen=True)
class Scale:
    """How large a twin is: the size of a head, the layers where no list says which, and kinds of numbers left alone."""

    head: int = 6
    layers: int = 2
    kept: frozenset[str] = frozenset()
    filled: bool = False  # whether sizes that are not set are


_SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3", "su", "ntk")  # of positions


# ---------------------------------------------------------------- classes

HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT",
         "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC")  # fmt: skip


def classes(model_type: str) -> list[str]:
    """Return the names of all classes that the installed transformers has for a model type, the bare model's last.

    Args:
        model_type: As in a configuration.
    """
    names = [name for name in vars(modeling_auto) if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", name)]
    first = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS]
    order = [*(name for name in first if name in names), *sorted(set(names) - set(first)), "MODEL_MAPPING_NAMES"]
    found: list[str] = []
    for name in order:
        entry = getattr(modeling_auto, name).get(model_type, ())
        found += [entry] if isinstance(entry, str) else list(entry)
    return list(dict.fromkeys(found))


def main_class(model_type: str) -> str:
    """Return the class of a model type whose outputs depend on most of it, see `HEADS`; the bare model's at last.

    Args:
        model_type: As in a configuration.

    Raises:
        ModelError: No class is known.
    """
    found = classes(model_type)
    if not found:
        raise ModelError(f"transformers has no model class for '{model_type}'")
    return found[0]


# ---------------------------------------------------------------- configurations


def twin_config(config: PretrainedConfig | str, scale: Scale | None = None) -> PretrainedConfig:
    """Return a configuration of the same structure with small sizes.

    Args:
        config: A configuration, or a model type, whose default configuration is meant.
        scale: How large it may be.

    Raises:
        ValueError: The class refuses what came out.
    """
    whole = CONFIG_MAPPING[config]() if isinstance(config, str) else config
    found = _Shrinking(whole, scale or Scale()).config(whole)
    _settle(found)
    return found


def _settle(config: PretrainedConfig) -> None:
    """No cache, no dropout, plain attention, experts one by one: in a configuration and its towers."""
    for each in _all(config):
        for name, value in _own(each).items():
            if type(value) in (int, float) and re.search(r"drop(out|_path)?(_rate|_prob)?$", name):
                setattr(each, name, type(value)(0))
            if name == "use_cache":
                each.use_cache = False
        each._attn_implementation = "eager"
        each._experts_implementation = "eager"


def _all(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _all(value)


def _own(config: PretrainedConfig) -> dict[str, Any]:
    """The settings that a configuration's class takes, with their values."""
    cls: Any = type(config)
    declared = (
        (each.name for each in fields(cls) if each.init) if is_dataclass(cls) else inspect.signature(cls).parameters
    )
    held = vars(config)
    own = {name: held[name] for name in declared if name in held and name not in _ASIDE}
    overrides = getattr(held.get("_heterogeneity_spec"), "per_layer_overrides", None)
    return own | ({"per_layer_config": deepcopy(overrides)} if overrides else {})


def _settings(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration's settings, those of single layers too."""
    for key, value in own.items():
        if key == "per_layer_config":
            for each in value.values():
                yield from each.items()
        else:
            yield key, value


class _Shrinking:
    """Sizes of one configuration with its towers, and what they become."""

    def __init__(self, whole: PretrainedConfig, scale: Scale) -> None:
        self.scale = scale
        scopes = [_own(config) for config in _all(whole)]
        shares = {share for scope in scopes for share in _shares(scope)}
        self.head = scale.head
        while any(int(self.head * share) < 2 or int(self.head * share) % 2 for share in shares) and self.head < 32:
            self.head += 2

        def of(*kinds: str) -> list[int]:
            return sorted({n for scope in scopes for key, value in _settings(scope) if kind_of_number(key) in kinds
                           for n in _numbers(value) if n >= WIDE})  # fmt: skip

        counts = {count for scope in scopes for count in self.heads(scope).values()}
        self.unit = self.head * lcm(*counts) if counts else self.head * 4
        widths = of("width")
        neurons = [n for n in of("neurons") if n not in widths]
        self.sizes = {n: self.unit * place for place, n in enumerate(widths, 1)}
        self.sizes |= dict(zip(neurons, chain(_FREE, range(102, 10**6, 4)), strict=False))
        self.inner = {n: self.head * place for place, n in enumerate(of("in head"), 1)}
        self.vocabularies = dict(zip([n for n in of("vocabulary") if n > VOCABULARY], _PRIMES, strict=False))
        smallest = VOCABULARY
        tokens = sorted({n for scope in scopes for key, value in _settings(scope) if kind_of_number(key) == "token"
                         for n in _numbers(value) if n >= smallest // 2})  # fmt: skip
        self.ids = {n: smallest - len(tokens) + place for place, n in enumerate(tokens)}

    def heads(self, scope: Mapping[str, Any]) -> dict[int, int]:
        """What the numbers of heads become: groups stay, the largest are at most eight."""
        counts = sorted({n for key, value in scope.items() if kind_of_number(key) in ("heads", "key heads")
                         for n in _numbers(value) if n > 1})  # fmt: skip
        if "heads" in self.scale.kept:
            return {n: n for n in counts}
        if len(counts) == 1:
            return {counts[0]: min(counts[0], 4) if counts[0] % 4 == 0 else min(counts[0], 2)}
        found, last = {}, 1
        for n in counts:
            last = found[n] = min(last * 2, 8)
        return found

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        own = _own(config)
        small = self.scope(own)
        derived = self.derived(config, own)
        given = {name: value for name, value in small.items() if name not in derived}
        labels: Any = {} if getattr(config, "num_labels", None) is None else {"num_labels": LABELS}
        return type(config)(**given, **labels)

    def derived(self, config: PretrainedConfig, own: Mapping[str, Any]) -> set[str]:
        """Settings that the class makes of the others; lists with an entry per layer are chosen, not made."""
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
        except Exception:  # it needs them
            return set()
        return {name for name in unset if getattr(again, name, None) == own[name]
                and kind_of_number(name) not in ("vocabulary", "token")}  # fmt: skip

    def scope(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of one configuration, small."""
        scale = self.scale
        heads = self.heads(own)
        depths = {n: _chosen(own, n, self.least(own)) for n in _depths(own)}
        patch = next((n for key, value in own.items() if kind_of_number(key) == "patch" for n in _numbers(value)), 1)
        small_patch = min(patch, 2) if "patch" not in scale.kept else patch
        lists = (own.get(key) for key in ("depths", "hidden_sizes"))
        grid: int = max(GRID, 2 ** next((len(each) for each in lists if isinstance(each, list | tuple)), 0))
        hidden: int = next((own[key] for key in _HIDDEN if _is_number(own.get(key))), 0)
        counts: list[tuple[str, int]] = [(key, own[key]) for kind in ("heads", "key heads") for key in own
                  if kind_of_number(key) == kind and _is_number(own[key])]  # fmt: skip
        count = counts[0][1] if counts else 0
        multiples: list[int] = [1, *(n for key, n in own.items() if "expand" in key and _is_number(n))]
        in_heads = {key: n for key, n in own.items() if kind_of_number(key) == "in head" and _is_number(n)}

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
            if kind == "rotary":
                whole = hidden // count if count else 0
                head: int = (
                    self.sizes[hidden] // heads.get(count, count) if whole and hidden in self.sizes else self.head
                )
                return head if n >= whole else max(2, head * n // whole // 2 * 2)
            if kind == "in head":
                return in_head(key, n)
            if kind == "layers":
                return len(depths[n]) if n in depths else min(n, scale.layers)
            if kind == "image":
                return small_patch * min(max(n // patch, 1), grid)
            if kind == "upscaling":
                return max(1, n // patch) * small_patch
            maps: dict[str, Mapping[int, int]] = {
                "token": self.ids, "vocabulary": self.vocabularies, "heads": heads, "key heads": heads,
                "width": self.sizes, "neurons": self.sizes,
            }  # fmt: skip
            return maps[kind].get(n, n) if kind in maps else min(n, _MOST.get(kind, n))

        def value_of(key: str, value: Any) -> Any:
            if isinstance(value, PretrainedConfig):
                return self.config(value)
            if key == "per_layer_config":
                chosen = next(iter(depths.values()))
                return {place: {name: value_of(name, each) for name, each in value[layer].items()}
                        for place, layer in enumerate(chosen) if layer in value}  # fmt: skip
            if "pinpoints" in key:
                return [[grid * small_patch] * 2]
            if _is_number(value):
                return number(key, value)
            if isinstance(value, list | tuple):
                for n, chosen in depths.items():
                    if _is_per_layer(value, n):
                        return type(value)(value_of(key, value[layer]) for layer in chosen)
                for n, chosen in depths.items():
                    if _is_layers(key, value, n):
                        return type(value)(place for place, layer in enumerate(chosen) if layer in value)
                if value and all(map(_is_number, value)):
                    return type(value)(number(key, n) for n in value)
            if isinstance(value, float) and re.search(r"(width|depth)_(coefficient|mult)", key):
                return min(value, 1.0)
            return deepcopy(value)

        small = {key: value_of(key, value) for key, value in own.items()}
        width = next((small[key] for key in _HIDDEN if _is_number(small.get(key))), self.unit)
        number_of = next((small[key] for key, _ in counts), 1)
        if scale.filled:
            sizes = {"in head": width // number_of, "key heads": max(1, number_of // 2), "experts": _MOST["experts"],
                     "vocabulary": VOCABULARY, "width": width, "neurons": _FREE[0], "positions": POSITIONS, "layers": 2,
                     "chosen": 2, "chosen groups": 1, "groups": 1}  # fmt: skip
            small |= {key: sizes[kind_of_number(key)] for key, value in small.items()
                      if value is None and kind_of_number(key) in sizes}  # fmt: skip
        head = small.get("head_dim")
        head = head if _is_number(head) else width // max(number_of, 1)
        for key in ("rope_parameters", "rope_scaling"):
            if key in small:
                small[key] = _rotary(small[key], head, scale.filled)
        return small

    def least(self, own: Mapping[str, Any]) -> int:
        """The number of layers where no list tells them apart: twice a period, one more than the first ones."""
        periods = any(kind_of_number(key) == "period" and _is_number(value) and value > 1 for key, value in own.items())
        first = any(kind_of_number(key) == "first" and _is_number(value) and value > 0 for key, value in own.items())
        return max(self.scale.layers, 4 if periods else 3 if first else 2)


def _shares(own: Mapping[str, Any]) -> Iterator[float]:
    """The shares of a head that rotary embeddings turn, wherever a configuration says so."""
    for key, value in own.items():
        if isinstance(value, Mapping):
            yield from _shares(value)
        elif key in ("partial_rotary_factor", "rotary_pct") and isinstance(value, int | float):
            yield value


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers of a setting: one, or a list of them."""
    yield from (n for n in (value if isinstance(value, list | tuple) else [value]) if _is_number(n))


def _depths(own: Mapping[str, Any]) -> list[int]:
    """The numbers of layers of a configuration that lists may be as long as."""
    return sorted({value for key, value in own.items()
                   if kind_of_number(key) == "layers" and _is_number(value) and value > 1}, reverse=True)  # fmt: skip


def _is_per_layer(value: Any, depth: int) -> bool:
    """Whether a setting is a list with an entry for each of so many layers."""
    return (isinstance(value, list | tuple) and len(value) == depth and len(value) > 0
            and (not all(map(_is_number, value)) or len(set(value)) < len(value) or depth > 6))  # fmt: skip


def _is_layers(key: str, value: Any, depth: int) -> bool:
    """Whether a setting is a list of numbers of layers."""
    return (isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_number, value))
            and list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < depth
            and re.search(r"(layers|idxs|indices|indexes|_ids)$", key) is not None)  # fmt: skip


def _per_layer(own: Mapping[str, Any], key: str) -> bool:
    return any(_is_per_layer(own[key], n) or _is_layers(key, own[key], n) for n in _depths(own))


def _chosen(own: Mapping[str, Any], depth: int, least: int) -> list[int]:
    """The layers that a twin has of so many: the first two of every kind that lists tell, or the first."""
    lists = [[str(item) for item in value] for value in own.values() if _is_per_layer(value, depth)]
    lists += [
        [str(layer in value) for layer in range(depth)] for key, value in own.items() if _is_layers(key, value, depth)
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
    """Rotary parameters without the scaling of positions, whose tables are as long as a head and free no symmetry."""
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
    """So many, in parts that are in about the same ratio."""
    ends = [total * sum(parts[: place + 1]) // sum(parts) for place in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# ---------------------------------------------------------------- models


def build(
    config: PretrainedConfig | str, cls: str | type[PreTrainedModel] | None = None, seed: int = 0
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a tiny twin in float64 with random parameters, and inputs that it runs on.

    Args:
        config: A configuration, or a model type.
        cls: The class, or its name (default: what the configuration names, else `main_class`).
        seed: Of parameters and inputs.

    Raises:
        ModelError: No twin could be made that runs; the first reason is named.
    """
    whole = CONFIG_MAPPING[config]() if isinstance(config, str) else config
    named = cls or next(iter(getattr(whole, "architectures", None) or ()), None) or main_class(whole.model_type)
    chosen: Any = getattr(transformers, named) if isinstance(named, str) else named
    wanted = getattr(chosen, "config_class", None)
    if wanted is not None and not isinstance(whole, wanted):  # the text model of a multimodal type
        whole = next((each for each in _all(whole) if isinstance(each, wanted)), wanted())
    reason = ""
    for scale in _scales(whole):
        try:
            small = twin_config(whole, scale)
            model = random_model(small, chosen, seed)
        except Exception as error:  # each class refuses sizes in its own way
            reason = reason or one_line(error)
            continue
        for given in _inputs(model, seed):
            try:
                if outputs(model, given):
                    return model, given
            except Exception as error:
                reason = reason or one_line(error)
    raise ModelError(f"no tiny '{whole.model_type}' runs: {reason}")


def _scales(config: PretrainedConfig) -> Iterator[Scale]:
    """The scales to try, the smallest first."""
    yield from (Scale(), Scale(filled=True), Scale(8), Scale(16), Scale(32))
    present = {kind_of_number(key) for each in _all(config) for key in _own(each)}
    kinds = [kind for kind in _LEFT if kind in present]
    yield from (Scale(kept=frozenset({kind})) for kind in kinds)
    yield Scale(kept=frozenset({"image", "patch", "window"}))
    yield Scale(kept=frozenset({"width", "neurons", "in head", "heads", "groups"}))


def random_model(config: PretrainedConfig, cls: Any, seed: int = 0) -> PreTrainedModel:
    """Return a model with every parameter random, biases, norms and running statistics too.

    Args:
        config: Its configuration.
        cls: Its class.
        seed: Of the parameters; the global random state is left as it was.

    Returns:
        The model in float64 and eval mode. A norm's weight is in 0.5 to 1.5, a matrix about as large as keeps the size
        of what it is applied to, an embedding about one.
    """
    config = deepcopy(config)
    with torch.device("meta"), _quietly():
        count = sum(p.numel() for p in cls(deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"{cls.__name__} would have {count:,} parameters")
    with torch.random.fork_rng(devices=[]), _quietly():
        torch.manual_seed(seed)
        model: Any = cls(config)
        one_by_one(model)
        model.train(False)
        kept = model.state_dict().keys()
        seen: set[int] = set()
        with torch.no_grad():
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is None or not parameter.is_floating_point():
                        continue
                    if id(parameter) not in seen:
                        parameter.data = _random(module, name, parameter.data.double())
                        parameter.requires_grad_(True)
                        seen.add(id(parameter))
            for prefix, module in model.named_modules():
                for name, held in list(module._buffers.items()):
                    if held is None:
                        continue
                    if held.is_complex():
                        module._buffers[name] = held.to(torch.complex128)
                    elif held.is_floating_point():
                        held = held.double()
                        if f"{prefix}.{name}".lstrip(".") in kept:  # running statistics, corrections of a router
                            held = held + 0.3 * torch.rand_like(held)
                        module._buffers[name] = held
    found: PreTrainedModel = model
    return found


def _random(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Random numbers in place of a parameter, as large as its part in a module asks."""
    noise = torch.randn_like(value)
    if isinstance(module, nn.Embedding):
        return noise
    if value.dim() > 1:
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            return noise / sqrt(max(prod(value.shape[1:]), 1))
        return noise / sqrt(max(value.shape[-2:]))
    first = value.flatten()[:1]
    if value.numel() == 0 or bool((value == first).all()):  # a constant: zeros of a bias, ones of a norm
        if float(first) == 0:
            return 0.3 * noise
        return (0.5 + torch.rand_like(value)) * (float(first) if abs(float(first)) > 0.1 else 1.0)
    return value * (1 + 0.1 * torch.rand_like(value))


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: Mapping[str, Any], seed: int = 0) -> list[Tensor]:
    """Return all floating-point outputs of a model that say what it computes: logits, or the last hidden state.

    Args:
        model: A model in float64.
        inputs: What its `forward` takes.
        seed: Of what the forward pass draws.
    """
    with torch.random.fork_rng(devices=[]), in_float64():
        torch.manual_seed(seed)
        found = model(**inputs)
    named = (
        found.items() if isinstance(found, Mapping) else enumerate(found if isinstance(found, Sequence) else [found])
    )
    return [value for name, value in named if isinstance(value, Tensor) and value.is_floating_point()]


def in_float64() -> Float64:
    """Return a context in which nothing is computed in less than float64, whatever a class casts to."""
    return Float64()


# ---------------------------------------------------------------- inputs


def _inputs(model: PreTrainedModel, seed: int) -> Iterator[dict[str, Any]]:
    """Inputs for a model by what its `forward` takes, the most telling first."""
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    needed = [name for name, each in accepted.items() if each.default is inspect.Parameter.empty
              and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]  # fmt: skip
    makers = _makers(model, generator)
    main = [name for name in (model.main_input_name,) if name in accepted]
    more = [
        name
        for name in ("input_ids", "attention_mask", "decoder_input_ids", "bbox", "pixel_values")
        if name in accepted
    ]

    def made(names: Sequence[str]) -> dict[str, Any]:
        return {name: makers[name]() for name in dict.fromkeys(names) if name in makers}

    yield made([*needed, *main, *more])
    if "pixel_values" in more and "input_ids" in accepted:
        yield made([name for name in [*needed, *main, *more] if name != "pixel_values"])
    yield made([*needed, *main])


def _makers(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Callable[[], Any]]:
    config: Any = model.config
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None) or config
    decoder = config.get_text_config(decoder=True)

    def number(scope: Any, *names: str, default: int) -> int:
        return next((value for name in names if _is_number(value := getattr(scope, name, None))), default)

    def ids(scope: Any, length: int = LENGTH) -> Tensor:
        vocabulary = number(scope, "vocab_size", default=VOCABULARY)
        special = {n for each in _all(config) for key, value in _own(each).items() if kind_of_number(key) == "token"
                   for n in _numbers(value)}  # fmt: skip
        plain = torch.tensor([n for n in range(vocabulary) if n not in special] or [0])
        return plain[torch.randint(len(plain), (BATCH, length), generator=generator)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def size(scope: Any) -> tuple[int, int]:
        found = getattr(scope, "image_size", None) or 32
        return (found, found) if isinstance(found, int) else tuple(found)[-2:]

    def pixels() -> Tensor:
        channels = number(vision, "num_channels", "in_channels", "in_chans", default=3)
        shape = (BATCH, channels, *size(vision))
        frames = number(vision, "num_frames", default=0)
        return normal(BATCH, frames, *shape[1:]) if frames else normal(*shape)

    def boxes() -> Tensor:
        most = number(text, "max_2d_position_embeddings", default=32)
        corner = torch.randint(0, most // 2, (BATCH, LENGTH, 2), generator=generator)
        return torch.cat([corner, corner + torch.randint(0, most // 2, (BATCH, LENGTH, 2), generator=generator)], -1)

    def features() -> Tensor:
        bins = number(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        frames = 2 * number(config, "max_source_positions", default=16)
        return normal(BATCH, bins, frames)

    return {
        "input_ids": lambda: ids(text), "decoder_input_ids": lambda: ids(decoder),
        "attention_mask": lambda: torch.ones(BATCH, LENGTH, dtype=torch.long), "pixel_values": pixels, "bbox": boxes,
        "input_features": features, "input_values": lambda: normal(BATCH, 4000),
    }  # fmt: skip
