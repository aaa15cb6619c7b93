# SPDX-License-Identifier: Apache-2.0
"""Tiny twins: small models of any type that `transformers` has, made from a configuration alone.

A twin has the structure of its model but not its size: few and small layers, random parameters, float64. Its sizes are
those of `shrinking`. If a class refuses them, other scales are tried, and then one kind of number after another is left
unchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from onebasin.models import ModelError
from onebasin.models.configuration import built_in

from .classes import classes_of, located_message, modeling_of, quietly, seeded, unregistered, without_memory
from .configuration import configs, default_config, kind_of_number, settings
from .expert_layout import one_by_one
from .float64 import OnlyFloat64
from .made_inputs import LENGTH, Way, length_named, made_inputs, senses, widths_named
from .shrinking import Scale, twin_config
from .unset import ALL
from .verification import INTERNAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 30_000_000  # most parameters of a twin, some of whose sizes may not be small
SECONDS = 30.0  # of computing, to search for a twin that runs
KEPT = ("patch", "window", "positions", "distances", "heads", "groups", "layers", "in head", "neurons",
        "vocabulary", "width")  # fmt: skip

HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT",
         "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC")  # fmt: skip

_FOUND: dict[tuple[str, str], tuple[Scale, Way]] = {}  # class and configuration, requested scale -> how a twin ran
_REFUSED: dict[tuple[str, str], str] = {}  # the same, if none ran -> why

LAST = ("PRETRAINING", "IMAGE", "BACKBONE", "TEXT_ENCODING")


def classes(model_type: str) -> list[str]:
    """Return the names of all classes that the installed transformers has for a model type, the most suitable first, or
    of those that a program has registered for a type of its own."""
    names = [name for name in vars(modeling_auto) if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", name)]
    first = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS]
    last = ["MODEL_MAPPING_NAMES", *(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in LAST)]
    order = [*first, *sorted(set(names) - {*first, *last}), *last]
    found: list[str] = []
    for name in order:
        entry = getattr(modeling_auto, name, {}).get(model_type, ())
        found += [entry] if isinstance(entry, str) else list(entry)
    if model_type in CONFIG_MAPPING and not built_in(model_type):
        found = [cls.__name__ for cls in reversed(classes_of(CONFIG_MAPPING[model_type]))]
    return list(dict.fromkeys(found))


def build(
    config: PretrainedConfig | str,
    cls: str | type[PreTrainedModel] | None = None,
    seed: int = 0,
    scale: Scale | None = None,
    layers: int = 2,
    probes: Callable[[PreTrainedModel], Iterable[dict[str, Any]]] | None = None,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a tiny twin in float64 with random parameters, and inputs that it runs on.

    Args:
        config: A configuration, or a model type.
        cls: The class, or its name (default: the one in the configuration, else the first of `classes`, else of
            `unregistered`).
        seed: Of parameters and inputs.
        scale: Its size (default: the smallest at which it runs).
        layers: The least number of layers, unless `scale` is given.
        probes: Returns the inputs to try (default: `made_inputs`).

    Raises:
        ModelError: No twin could be made that runs; the first reason is named.
    """
    whole = default_config(config) if isinstance(config, str) else config
    stated = cls or next(iter(getattr(whole, "architectures", None) or ()), None)
    known = [stated] if stated else classes(whole.model_type) or unregistered(whole)
    if not known:
        raise ModelError(f"transformers has no model class for '{whole.model_type}', neither registered nor in its "
                         "module")  # fmt: skip
    reasons: list[str] = []
    for each in (known[0], *known[-1:0:-1]):
        scales = [scale] if scale else [replace(each, layers=layers) for each in _scales(whole)]
        found = _first_that_runs(whole, each, seed, reasons, scales, probes)
        if found is not None:
            return found
    raise ModelError(f"no tiny '{whole.model_type}' runs: {reasons[0]}")


def of_class(config: PretrainedConfig | str, cls: Any) -> tuple[PretrainedConfig, Any]:
    """Return the configuration that a class takes, which may be nested in another one (the text model of a multimodal
    type), and the class itself.

    Args:
        config: A configuration, or a model type, for its default configuration.
        cls: The class, or its name.
    """
    whole = default_config(config) if isinstance(config, str) else config
    found = _class_of(whole, cls) if isinstance(cls, str) else cls
    kind = getattr(found, "config_class", None)
    if kind is not None and not isinstance(whole, kind):
        whole = next((each for each in configs(whole) if isinstance(each, kind)), None) or kind()
    return whole, found


def _class_of(config: PretrainedConfig, name: str) -> Any:
    """Return the class of a name, which its package may not export."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    registered = {cls.__name__: cls for cls in classes_of(type(config))}
    if name in registered:
        return registered[name]
    return getattr(modeling_of(type(config)), name)


def _first_that_runs(
    whole: PretrainedConfig,
    cls: Any,
    seed: int,
    reasons: list[str],
    scales: list[Scale],
    probes: Callable[[PreTrainedModel], Iterable[dict[str, Any]]] | None,
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Return the first twin that runs, and its inputs, or append the reason why the first of all does not."""
    whole, cls = of_class(whole, cls)
    decoder = cls.__name__ in _names(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    layers, only = scales[0].layers, len(scales) == 1
    asked = f"{cls} {whole.to_dict()}"
    place = asked, str(scales[0]) if only else ""
    if not probes and place in _REFUSED:
        reasons.append(_REFUSED[place])
        return None
    known = None if probes else _FOUND.get(place, _FOUND.get((asked, "")))
    for scale, how in _like(scales[0], known, only):
        with suppress(Exception):  # it needs other inputs at this scale
            model = random_model(twin_config(whole, scale, decoder=decoder), cls, seed)
            given = how.made(model, seed)
            if any(bool(each.any()) for each in outputs(model, given)):  # behind a ReLU, all may be 0
                return model, given
    reason = ""
    named: dict[str, int | None] = {}
    widths: set[int] = set()
    length = LENGTH
    # What runs without some image or sound, after the names of those that reach its outputs.
    deaf: tuple[set[str], PreTrainedModel, dict[str, Any], Scale, Way | None] | None = None
    until = time.process_time() + SECONDS
    while scales and time.process_time() < until:
        said: list[Exception] = []
        try:
            tried, enough = scales.pop(0), time.process_time() + SECONDS / 3  # others may do better
            model = random_model(twin_config(whole, tried, decoder=decoder), cls, seed)
            wanted = senses(model)
            ways = ((None, each) for each in probes(model)) if probes else made_inputs(model, seed, widths, length)
            for way, given in ways:
                try:
                    if not (found := outputs(model, given)):
                        continue
                    heard = {name for name in wanted & given.keys() if _reaches(model, given, name, found)}
                    if wanted == heard:
                        if way is not None:
                            _FOUND[place] = tried, way
                        return model, given
                    if deaf is None or len(heard) > len(deaf[0]):
                        deaf, until = (heard, model, given, tried, way), time.process_time() + SECONDS / 6
                except Exception as error:
                    said.append(error)
                if time.process_time() > (until if deaf else min(until, enough)):
                    break
        except Exception as error:  # each class refuses sizes in its own way
            said.append(error)
        for refusal in said[:1]:
            reason = reason or f"{cls.__name__}: {located_message(refusal)}"
            wider = widths | widths_named(said)
            longer = length_named([refusal]) if length == LENGTH else length
            if (wider, longer) != (widths, length) and not probes:  # once more with inputs as wide, and as long
                widths, length = wider, longer
                scales.insert(0, tried)
            if "parameters" in str(refusal):
                scales.sort(key=lambda scale: scale.divisor != 8)
            more = _named(str(refusal))
            if not more.items() <= named.items() and not only:
                named |= more
                scales.insert(0, Scale(layers=layers, filled=dict(named)))
                scales.append(Scale(layers=layers, filled={**named, ALL: None}))
    if deaf is None:
        reasons.append(reason)
        if not probes:
            _REFUSED[place] = reason
        return None
    _, model, given, tried, way = deaf
    if way is not None:
        _FOUND[place] = tried, way
    return model, given


def _like(asked: Scale, known: tuple[Scale, Way] | None, only: bool) -> Iterator[tuple[Scale, Way]]:
    """Yield scales to try, with inputs, if a twin is known to run: its scale with the requested number of layers, or
    the requested scale with everything but the sizes of that one, and then with larger heads."""
    if known is None:
        return
    ran, how = known
    if not only:
        yield replace(ran, layers=asked.layers), how
        return
    larger = [ran.head] if asked.head == Scale.head else [2 * ran.head, 3 * ran.head]
    for head in dict.fromkeys([asked.head, *larger]):
        yield replace(asked, head=head, divisor=ran.divisor, filled=ran.filled, kept=ran.kept | asked.kept), how


def _named(said: str) -> dict[str, int | None]:
    """Return the names that an error quotes, and those to which it assigns a number, with that number."""
    found: dict[str, int | None] = dict.fromkeys(re.findall(r"['`](\w+)['`]", said))
    return found | {name: int(n) for name, n in re.findall(r"\b([a-z]\w+) ?= ?(\d+)\b", said)}


def _names(mapping: Mapping[str, Any]) -> set[str]:
    return {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}


def _scales(config: PretrainedConfig) -> Iterator[Scale]:
    """Yield the scales to try, the smallest first."""
    yield from (Scale(), Scale(8), Scale(filled={}), Scale(divisor=8), Scale(16), Scale(32), Scale(divisor=1))
    present = {kind_of_number(key) for each in configs(config) for key, _ in settings(each)}
    yield from (Scale(kept=frozenset({kind})) for kind in KEPT if kind in present)
    yield Scale(kept=frozenset({"image", "patch", "window"}))
    yield Scale(kept=frozenset({"groups"}), divisor=1)


def random_model(config: PretrainedConfig, cls: Any, seed: int = 0) -> PreTrainedModel:
    """Return a model in float64 and eval mode with all parameters random, including biases, norms and statistics.

    The weight of a norm is in 0.5 to 1.5, a matrix roughly preserves the size of its input, and an embedding is about
    1.

    Args:
        config: Its configuration.
        cls: Its class.
        seed: Of the parameters; the global random state is not changed.
    """
    config = deepcopy(config)
    count = sum(p.numel() for p in without_memory(cls, config).parameters())
    if count > LARGEST:
        raise ValueError(f"{cls.__name__} would have {count:,} parameters")
    with seeded(seed), quietly():
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
    """Return random numbers for a parameter, of a size that fits its part in a module."""
    noise = torch.randn_like(value)
    if isinstance(module, nn.Embedding):
        return noise
    if value.dim() > 1:
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            return noise / sqrt(max(prod(value.shape[1:]), 1))
        return noise / sqrt(max(value.shape[-2:]))
    first = value.flatten()[:1]
    if value.numel() == 0:
        return value
    if bool((value == first).all()):  # a constant: zeros of a bias, ones of a norm
        if float(first) == 0:
            return 0.3 * noise
        return (0.5 + torch.rand_like(value)) * (float(first) if abs(float(first)) > 0.1 else 1.0)
    return value * (1 + 0.1 * torch.rand_like(value))


def outputs(model: PreTrainedModel, inputs: Mapping[str, Any], seed: int = 0) -> list[Tensor]:
    """Return the floating-point outputs of a model in float64, without internal ones: logits, or the last hidden state.

    seed: of random numbers in the forward pass.
    """
    with torch.no_grad(), seeded(seed), OnlyFloat64():
        return floats_of(model(**inputs))


def _reaches(model: PreTrainedModel, inputs: Mapping[str, Any], name: str, found: list[Tensor]) -> bool:
    """Whether the outputs of a model, `found`, depend on an input: they change if its examples change places."""
    return not alike(found, outputs(model, {**inputs, name: inputs[name].flip(0)}))


def alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two runs of a model gave the same outputs up to rounding, with NaN in the same places."""
    pairs = zip(some, others, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def outward(found: Any) -> dict[str, Any]:
    """Return the outputs of a model by name, without internal ones such as hidden states.

    found: the return value of its `forward`.
    """
    named = dict(found.items()) if isinstance(found, Mapping) else {"": found}
    return {name: value for name, value in named.items() if not any(word in name for word in INTERNAL)}


def floats_of(found: Any) -> list[Tensor]:
    """Return all floating-point tensors in `outward(found)`."""
    return list(_floats(outward(found)))


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in an output, including those in lists."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(each)
