# SPDX-License-Identifier: Apache-2.0
"""The tiny twin of a model: its class, its configuration with small sizes and few layers, random parameters.

A twin has the structure of its model and nothing of its size, so what a table says of the model can be tried on it in
about a second. Which numbers of a configuration are sizes, and which go together, is told from their names: one set of
rules for all model types. Equal sizes stay equal and different ones different; ratios of heads to key and value heads,
and of experts to those chosen, stay above one where they were.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from onebasin.models import Canonical, Folder, Model, ModelError, Rewritten
from onebasin.models.folder import one_line
from onebasin.models.model import View
from onebasin.symmetry import Alignment, Signature, acting_groups
from onebasin.symmetry.groups.elements import Element

from .probes import probe
from .verification import _class, _outputs, _quietly, compare_rewritten

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, POSITIONS, GRID, LABELS = 64, 32, 8, 3
SPREAD = 0.3  # of the random parameters
TOLERANCE = 1e-8  # relative difference of outputs in float64; a wrong table changes them by about one
TRIES = ((4, 2), (4, 4), (8, 2), (8, 6), (16, 2), (20, 2), (32, 8))  # the size of a head, and the number of layers

# What the numbers of a configuration are, by name; the first that fits counts.
RULES = {
    "token": r"(_token|_token_id|_token_ids|_token_index)$",
    "vocabulary": r"vocab",
    "period": r"(every_n|interval|pattern|period|freq|_step)",
    "first": r"first_k",
    "upscaling": r"^encoder_stride$",
    "still": r"(feat_extract|kernel|stride$|padding|dilation|channels|scalar|mel_bins|shared_experts|layer_norm|_fft|"
             r"chunk|ngram)",
    "layers": r"(^|_)(n_)?(layers?|depths?)$",
    "in head": r"(head_dim|head_size|d_kv|d_head|dim_head)$",
    "key heads": r"(key_value_heads|kv_heads|n_head_kv|kv_n_heads)$",
    "heads": r"(^|_)(n_)?heads?$",
    "experts": r"(^|_)experts$",
    "chosen": r"(experts_per_tok(en)?|top_k|moe_topk)$",
    "chosen groups": r"topk_group$",
    "groups": r"(^n_group|_groups?|group_num)$",
    "distances": r"(bucket|relative|max_distance|codevectors)",
    "positions": r"(position|n_ctx|max_seq_len|seq_length)",
    "image": r"(^|_)image_size$",
    "patch": r"(^|_)patch_size$",
    "window": r"window_size$",
    "rotary": r"rotary_(dim|ndims)$",
    "width": r"(size|sizes|dim|dims|width|inner|rank|d_model|d_ff|n_embd|embed)$",
}  # fmt: skip

STAGES = ("stage_names", "out_features", "out_indices")  # of backbones: follow from the number of layers


@cache
def kind_of_number(name: str) -> str:
    """Return what a number of a configuration is, by its name: a key of `RULES`, or nothing."""
    return next((kind for kind, pattern in RULES.items() if re.search(pattern, name)), "")


@dataclass(frozen=True)
class Scale:
    """How large a twin is: the size of a head, at least, and the number of layers where no list says which."""

    head: int
    layers: int


def shrunk(config: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Return a configuration of the same structure with small sizes.

    Args:
        config: A configuration as a dictionary, with the defaults of its class and those of its towers.
        scale: How large it may be.

    Returns:
        The same keys; towers (`text_config`, ...) are shrunk with the same rules.

    Raises:
        ValueError: Rotary embeddings turn a share of a head that is too small to have it.
    """
    scopes = [config, *(value for key, value in config.items() if _tower(key, value))]
    widths = sorted({n for scope in scopes for key, value in scope.items() if kind_of_number(key) == "width"
                     for n in _numbers(value) if n > 1})  # fmt: skip
    in_heads = sorted({n for scope in scopes for key, value in scope.items() if kind_of_number(key) == "in head"
                       for n in _numbers(value)})  # fmt: skip
    heads = [count for scope in scopes for key, value in scope.items() if kind_of_number(key) == "heads"
             for count in (_heads(scope, n) for n in _numbers(value))]  # fmt: skip
    for share in _shares(config):
        if (turned := int(scale.head * share)) < 2 or turned % 2:
            raise ValueError(f"{share} of a head of {scale.head} is no number of rotary pairs")
    unit = scale.head * lcm(*heads)
    sizes = {n: unit * place for place, n in enumerate(widths, 1)}
    inner = {n: scale.head * place for place, n in enumerate(in_heads, 1)}
    tokens = sorted({n for scope in scopes for key, value in scope.items() if kind_of_number(key) == "token"
                     for n in _numbers(value) if n >= VOCABULARY // 2})  # fmt: skip
    ids = {n: VOCABULARY - len(tokens) + place for place, n in enumerate(tokens)}
    return _scope(config, scale, sizes, inner, ids)


def _scope(
    config: Mapping[str, Any], scale: Scale, sizes: Mapping[int, int], inner: Mapping[int, int], ids: Mapping[int, int]
) -> dict[str, Any]:
    """One configuration, given what the sizes and tokens of all become."""
    chosen = _layers(config, scale.layers)
    patch = next((n for key, value in config.items() if kind_of_number(key) == "patch" for n in _numbers(value)), 1)
    grid = 2 ** len(config["depths"]) if "depths" in config else GRID  # every stage halves it
    hidden = next(
        (config[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if _is_number(config.get(key))), 0
    )
    count = next((config[key] for key in config if kind_of_number(key) == "heads" and _is_number(config[key])), 0)

    def number(key: str, n: int) -> int:
        kind = kind_of_number(key)
        if kind in ("in head", "rotary"):
            whole = hidden // count if count else 0
            head = sizes[hidden] // _heads(config, count) if whole and hidden in sizes else scale.head
            if kind == "rotary":
                return head if n >= whole else max(2, head * n // whole // 2 * 2)
            return head if n * count == hidden else inner[n]
        small = {
            "token": ids.get(n, n), "vocabulary": min(n, VOCABULARY), "period": min(n, 2), "first": min(n, 1),
            "layers": min(n, len(chosen)), "heads": _heads(config, n), "key heads": _heads(config, n, keys=True),
            "experts": min(n, 4), "chosen": min(n, 2), "groups": min(n, 2), "chosen groups": min(n, 1),
            "distances": min(n, 8), "positions": min(n, POSITIONS), "patch": min(n, 2), "window": min(n, 2),
            "image": min(patch, 2) * min(n // patch, grid), "upscaling": max(1, n // patch) * min(patch, 2),
            "width": sizes.get(n, n),
        }  # fmt: skip
        return small.get(kind, n)

    def value_of(key: str, value: Any) -> Any:
        if _tower(key, value):
            return _scope(value, scale, sizes, inner, ids)
        if key in ("id2label", "label2id") and isinstance(value, Mapping):
            return dict(list(value.items())[:LABELS])
        if key in ("rope_parameters", "rope_scaling"):
            return _rotary(value)
        if "pinpoints" in key:
            return [[grid * min(patch, 2)] * 2]
        if _is_number(value):
            return number(key, value)
        if isinstance(value, (list, tuple)):
            if _per_layer(config, key):
                return [value[layer] for layer in chosen]
            if key.endswith("layers") and all(map(_is_number, value)):  # numbers of layers
                return [place for place, layer in enumerate(chosen) if layer in value]
            if value and all(map(_is_number, value)):
                return [number(key, n) for n in value]
        return value

    return {key: value_of(key, value) for key, value in config.items() if key not in STAGES}


def _shares(config: Mapping[str, Any]) -> Iterator[float]:
    """The shares of a head that rotary embeddings turn, wherever a configuration says so."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _shares(value)
        elif key in ("partial_rotary_factor", "rotary_pct") and isinstance(value, (int, float)):
            yield value


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers of a setting: one, or a list of them."""
    yield from (n for n in (value if isinstance(value, (list, tuple)) else [value]) if _is_number(n))


def _tower(key: str, value: object) -> bool:
    return key.endswith("_config") and isinstance(value, Mapping) and "model_type" in value


def _depth(config: Mapping[str, Any]) -> int:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
    return next((config[key] for key in names if _is_number(config.get(key))), 0)


def _per_layer(config: Mapping[str, Any], key: str) -> bool:
    """Whether a setting is a list of words or flags, one for each layer."""
    value = config[key]
    if not isinstance(value, (list, tuple)) or not value or len(value) != _depth(config):
        return False
    return not all(map(_is_number, value)) or set(value) == {0, 1}


def _layers(config: Mapping[str, Any], least: int) -> list[int]:
    """The layers that a twin has: the first, and the first of every kind that lists of one entry per layer tell."""
    depth = _depth(config)
    lists = [value for key, value in config.items() if _per_layer(config, key)]
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(str([each[layer] for each in lists]), layer)
    chosen = set(kinds.values()) if lists else set()
    more = (layer for layer in range(depth) if layer not in chosen)
    while len(chosen) < min(least, depth):
        chosen.add(next(more))
    return sorted(chosen) or list(range(least))


def _heads(config: Mapping[str, Any], n: int, *, keys: bool = False) -> int:
    """The number of heads of a twin for `n`, or of its key and value heads: groups of two where there were groups."""
    counts = [n for key, value in config.items() if kind_of_number(key) == ("heads" if keys else "key heads")
              for n in _numbers(value)]  # fmt: skip
    other = counts[0] if counts else n
    if keys:
        return min(n, 2)
    return min(n, 4) if 1 < other < n else min(n, 2)


def _rotary(value: Any) -> Any:
    """Rotary parameters without the scaling of positions, whose tables are as long as a head and free no symmetry."""
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(each, Mapping) for each in value.values()):
        return {key: _rotary(each) for key, each in value.items()}
    kept = {key: each for key, each in value.items() if key in ("rope_theta", "partial_rotary_factor")}
    return {"rope_type": "default", **kept} if "rope_theta" in value else None


def random_model(config: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model of a configuration in its class, with every parameter random, biases and norms too.

    Args:
        config: The configuration as a dictionary, with `model_type` and, where it has a head, `architectures`.

    Returns:
        The model in float64 and eval mode; the global random state is left as it was.
    """
    built = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
    cls = _class(built)
    with torch.random.fork_rng(devices=[]), _quietly():
        torch.manual_seed(0)
        found: PreTrainedModel = cls(built) if hasattr(cls, "config_class") else cls.from_config(built)
        module: nn.Module = found
        module.to(torch.float64).train(False)
        with torch.no_grad():
            for tensor in module.parameters():
                spread = min(SPREAD, 4 * SPREAD / max([1, *tensor.shape]) ** 0.5)
                tensor.add_(spread * torch.randn_like(tensor))
            kept = module.state_dict().keys()
            for name, held in module.named_buffers():  # running statistics, corrections of a router
                if name in kept and held.is_floating_point():
                    held.add_(SPREAD * torch.rand_like(held))
    return found


def saved_twin(model: Folder, place: Path) -> Folder:
    """Write the twin of a model folder and open it with the same table.

    Args:
        model: The folder; only its configuration and the names of its tensors are read.
        place: An existing folder to write into.

    Returns:
        The twin.

    Raises:
        ModelError: No small model of this configuration could be made whose layers have the same tensors.
    """
    raw = model.raw_config
    whole = {**CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw)).to_dict(), "model_type": raw["model_type"]}
    reason = ""
    for head, layers in TRIES:
        folder = Path(tempfile.mkdtemp(dir=place))
        try:
            made = random_model(shrunk(whole, Scale(head, layers)))
            _outputs(made, probe(made, made, 2, 8, 0), 0)
            with _quietly():
                made.save_pretrained(folder)
        except Exception as error:  # each class refuses sizes in its own way
            reason = reason or one_line(error)
            continue
        found = Folder(folder, model._family)
        found.name = model.name
        lacking = _patterns(model.signature) - _patterns(found.signature)
        if not lacking:
            return found
        reason = reason or f"it lacks '{min(lacking)}'"
    raise ModelError(f"'{model.name}': no small model of its configuration could be made to try its table on "
                          f"({reason}); use --verify outputs")  # fmt: skip


def _patterns(signature: Signature) -> set[str]:
    """Return the names of the layers' tensors, without the numbers of layers and experts."""
    return {re.sub(r"\d+", "{}", role) for role, entry in signature.tensors.items() if entry.layer is not None}


def departure_on_twin(model: Model) -> float:
    """Return by how much a table changes the function of the twin of a model: the largest relative output difference.

    The twin is brought into the form of the model (canonical or as it is), and a random element acts on every space
    that may move. It depends on the configuration and the table alone, so it is found once for each and kept.

    Args:
        model: A model folder, or a view of one.

    Returns:
        The difference, in float64: rounding is about 1e-12.

    Raises:
        ModelError: There is no such twin, see `saved_twin`.
    """
    origin, canonical = model.origin, _in_canonical_form(model)
    what = json.dumps([origin.raw_config, repr(origin.table), canonical, sorted(_patterns(origin.signature))])
    if what not in _FOUND:
        with tempfile.TemporaryDirectory() as place:
            twin = saved_twin(origin, Path(place))
            form = Canonical(twin, torch.float64) if canonical else twin
            _FOUND[what] = max(_changed(twin, form, level) for level in (("invertible",) if canonical else LEVELS))
    return _FOUND[what]


_FOUND: dict[str, float] = {}
LEVELS = ("permutation", "paper")  # those that need no canonical form


def _in_canonical_form(model: Model) -> bool:
    return isinstance(model, Canonical) or (isinstance(model, View) and _in_canonical_form(model.base))


def _changed(twin: Folder, form: Model, level: str) -> float:
    """The relative difference that a random element of every group of a level makes."""
    moved = Rewritten(form, scrambling(form.signature, level), torch.float64)
    return compare_rewritten(twin, moved, arithmetic=torch.float64, dtype=torch.float64).relative_difference


def scrambling(signature: Signature, level: str, only: str | None = None) -> Alignment:
    """Return a random element of every group that acts at a level, or on the spaces of one name only.

    Args:
        signature: Of the model.
        level: As in `LEVELS` of `onebasin.symmetry`, scales included.
        only: The name of a space.
    """
    generator = torch.Generator().manual_seed(0)
    elements: dict[str, Element] = {}
    for root, group in acting_groups(signature, level, rescale="joint").items():
        space = signature.spaces[root]
        if only in (None, space.name):
            elements[root] = group.random(space.size, tuple(signature.sizes[key] for key in space.batch), generator)
    return Alignment(elements, {root: signature.spaces[root].batch for root in elements})
