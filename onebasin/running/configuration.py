# SPDX-License-Identifier: Apache-2.0
"""The settings of configurations: those that a class accepts, the kind of number that each is, lists with an entry per
layer. All of this is inferred from names, by one set of rules for all model types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeGuard

from transformers import CONFIG_MAPPING, PretrainedConfig, configuration_utils

from .classes import modeling_of

# The kinds of numbers in a configuration, by patterns of their names; the first that matches counts.
RULES = {
    "token": r"(_token|_token_id|_token_ids|_token_index)$",
    "codes": r"codebook_size$",
    "vocabulary": r"vocab",
    "offset": r"layer_offset$",
    "period": r"(every_n|interval|pattern$|layer_period|sparse_step|frequency$|layer_step)",
    "first": r"(first_k|num_dense_layers)",
    "shared": r"shared_layers$",
    "upscaling": r"^encoder_stride$",
    "patches": r"^num_patches$",
    "bins": r"mel_bins$",
    "ratio": r"mlp_ratio$",
    "shared experts": r"shared_experts$",
    "chunk": r"^(mamba_)?chunk_size$",
    "still": r"(feat_extract|kernel|stride|padding|dilation|scalar|"
             r"layer_norm|_fft|chunk|ngram|temperature|merge|pos_emb|seconds|per_token|layer_freq|max_window|feature_layer)",
    "layers": r"(^|_)(n_)?(layers?|depths?|blocks)$",
    "in head": r"(head_dim|head_size|d_kv|d_head|dim_head|headdim|groups_width)$",
    "key heads": r"(key_value_heads|kv_heads|n_head_kv|kv_n_heads)$",
    "heads": r"(^|_)(n_)?heads?(_per_layer|_per_stage)?$",
    "frames": r"(num_frames|frames_per_clip)$",
    "experts": r"(^|_)(experts|expert_num)$",
    "chosen": r"(experts_per_tok(en)?|moe_top_?k|moe_k)$",
    "chosen groups": r"topk_group$",
    "head groups": r"(^|_)n_?groups$",
    "groups": r"(^n_group|_groups?|group_num)$",
    "distances": r"((?<!hash_)bucket|relative|max_distance|codevectors)",
    "queries": r"(num_queries|query_num)$",
    "labels": r"_labels$",
    "image tokens": r"(mm_tokens_per_image|num_image_tokens|soft_tokens_per_image)$",
    "positions": r"(position|n_ctx|^max_length$|max_seq_len|max_text_length|seq_length|max_pos|block_size|"
                 r"hash_buckets)",
    "image": r"(^|_)(im(age|g)|crop)_size$",
    "patch": r"(^|_)patch_sizes?$",
    "local": r"attention_window$",
    "window": r"window_sizes?$",
    "rotary": r"rotary_(dim|ndims)$",
    "neurons": r"(intermediate|ffn|mlp|inner|d_ff|dim_ff|^dff$|feed_?forward)",
    "width": r"(hidden_size_\w+|size|sizes|dims?|width|rank|d_model|n_embd|embed|channels?|units|filters|features|"
             r"dim_per_stage|d_state|d_ssm|latents|dimension|channel_list)$",
}  # fmt: skip
ASIDE = {"transformers_version", "id2label", "label2id", "num_labels", "dtype", "torch_dtype", "problem_type",
         "stage_names", "out_indices", "return_dict",
         "output_hidden_states", "output_attentions"}  # fmt: skip
STAGED = ("depths", "hidden_sizes")  # lists with an entry for each stage
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width")  # names of the width of a stream


@cache
def kind_of_number(name: str) -> str:
    """Return the kind of a number in a configuration, by its name: a key of `RULES`, or ""."""
    return next((kind for kind, pattern in RULES.items() if re.search(pattern, name)), "")


def default_config(model_type: str) -> PretrainedConfig:
    """Return the default configuration of a model type.

    Raises:
        ValueError: The class refuses its own defaults, and also the values that its message asks for.
    """
    cls: Any = CONFIG_MAPPING[model_type]
    try:
        return cls()  # type: ignore[no-any-return]
    except Exception as error:  # each class has its own checks
        wanted = re.findall(r"(\w+) must be (\d+)", str(error))
        if not wanted:
            raise
        asked = {name: int(n) for name, n in wanted}
        return cls(**{tower: asked for tower in cls.sub_configs})  # type: ignore[no-any-return]


def configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and those nested in it."""
    return (each for _, each in nested(config))


def nested(config: PretrainedConfig, place: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield a configuration and those nested in it, with their places: `outer.inner`, of itself an empty string."""
    yield place, config
    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            yield from nested(value, f"{place}.{key}".lstrip("."))


def declared(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that a configuration's class declares, with their values."""
    cls: Any = type(config)
    names = (each.name for each in fields(cls) if each.init) if is_dataclass(cls) else inspect.signature(cls).parameters
    held, places = vars(config), getattr(cls, "attribute_map", {})  # a value may be stored under another name
    own = {name: held[places.get(name, name)] for name in names
           if places.get(name, name) in held and name not in ASIDE}  # fmt: skip
    overrides = getattr(held.get("_heterogeneity_spec"), "per_layer_overrides", None)
    if own.keys() & {"_out_indices", "_out_features"}:
        own.pop("_out_features", None)
    return own | ({"per_layer_config": deepcopy(overrides)} if overrides else {})


def _undeclared(config: PretrainedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that its class does not declare: switches, words, sizes."""
    more = {name: value for name, value in vars(config).items() if name not in own and name[0] != "_"
            and isinstance(value, bool | int | str)}  # fmt: skip
    try:
        again = type(config)(**deepcopy(dict(own))) if more else config
    except Exception:  # it needs what is missing
        return more
    return {name: value for name, value in more.items() if not hasattr(again, name)}


def all_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of a configuration, whether its class declares them or not."""
    own = declared(config)
    return own | _undeclared(config, own)


def settings(config: PretrainedConfig | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration's settings, including those of single layers."""
    for key, value in (declared(config) if isinstance(config, PretrainedConfig) else config).items():
        if key == "per_layer_config":
            for each in value.values():
                yield from each.items()
        else:
            yield key, value


def words_of_layers(cls: type, part: str) -> list[str]:
    """Return the kinds of layers that the modeling code of a configuration class mentions."""
    try:
        module = modeling_of(cls)
    except ImportError:
        return []
    known = getattr(configuration_utils, f"ALLOWED_{part}_LAYER_TYPES", ())
    source = inspect.getsource(module)
    return [word for word in known if f'"{word}"' in source]


def narrowed(divisor: int, scope: Mapping[str, Any]) -> int:
    """Return the divisor of widths, halved until heads keep four numbers, or all that they have: with one, their
    numbers could be exchanged with those of other heads, and with two, this holds for each half that rotates.

    scope: the settings of a configuration, whose numbers of heads stay.
    """
    counts, widths = ([n for key, n in scope.items() if kind_of_number(key) == kind and is_number(n)]
                      for kind in ("heads", "width"))  # fmt: skip
    for width in [n for key in HIDDEN for n in numbers(scope.get(key))] or widths:
        while any(width >= 2 * n and width // divisor < n * min(width // n, 4) for n in counts):
            divisor //= 2
    return divisor


def rotary_shares(own: Mapping[str, Any]) -> Iterator[float]:
    """Yield the shares of a head that are rotated by rotary embeddings, wherever a configuration states them."""
    for key, value in own.items():
        if isinstance(value, Mapping):
            yield from rotary_shares(value)
        elif key in ("partial_rotary_factor", "rotary_pct") and isinstance(value, int | float):
            yield value


def is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def numbers(value: Any) -> Iterator[int]:
    """Yield the integers of a setting: one, or a list of them."""
    yield from (n for n in (value if isinstance(value, list | tuple) else [value]) if is_number(n))


def stages_of(own: Mapping[str, Any]) -> list[int]:
    """Return the numbers of stages in a configuration, which are the lengths of its lists with an entry for each."""
    return [len(own[key]) for key in STAGED if isinstance(own.get(key), list | tuple)]


def depths_of(own: Mapping[str, Any]) -> list[int]:
    """Return the numbers of layers in a configuration, which its lists may have as lengths; not those of stages."""
    found = {value for key, value in own.items() if kind_of_number(key) == "layers" and is_number(value) and value > 1}
    return sorted(found.difference(stages_of(own)), reverse=True)


def is_per_layer(value: Any, depth: int) -> bool:
    """Return whether a setting is a list with an entry for each of `depth` layers."""
    return (isinstance(value, list | tuple) and len(value) == depth and len(value) > 0
            and (not all(map(is_number, value)) or len(set(value)) < len(value) or depth > 6))  # fmt: skip


def is_staged(key: str, value: Any) -> bool:
    """Return whether a setting is a list of the numbers of heads in a few stages, whose widths grow with them."""
    return "heads" in kind_of_number(key) and isinstance(value, list | tuple) and len(value) < 6


def is_layers(key: str, value: Any, depth: int) -> bool:
    """Return whether a setting is a list of layer indices."""
    return (isinstance(value, list | tuple) and len(value) > 0 and all(map(is_number, value))
            and list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < depth
            and re.search(r"(layers|idxs|indices|indexes|_ids)$", key) is not None)  # fmt: skip
