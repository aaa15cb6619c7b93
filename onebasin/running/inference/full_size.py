# SPDX-License-Identifier: Apache-2.0
"""The tensors of the model itself, which is built without weights: a table is inferred from twins that have fewer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onebasin.running import twins
from onebasin.running.classes import without_memory
from onebasin.symmetry import OtherSizes, OtherTensors, Signature, TableError, read_table, resolve

from .sizes import expressions
from .tracing import Traced, as_stored, untied

OPTIONS, CHOICES = 4, 64  # most expressions for a size, and most of their combinations, that are tried

Stored = tuple[dict[str, tuple[int, ...]], dict[str, Any]]  # the shapes of all tensors in a file, and config.json


def stored(config: PretrainedConfig | str, cls: str) -> Stored | None:
    """Return what a folder has of a model with random weights; None if the class refuses the configuration.

    config: a configuration, or a model type, for its default configuration. cls: the name of the class.
    """
    try:
        whole, kind = twins.of_class(config, cls)
        model = without_memory(kind, whole)
        with torch.device("meta"):  # for what the names of a file are computed with
            return _file_of(model, untied(model))
    except Exception:  # each class has its own checks, and some of them fail for its own defaults
        return None


def _file_of(model: PreTrainedModel, tied: Mapping[str, str]) -> Stored:
    """Return what a folder has of a model whose tied tensors are stored once."""
    state = {name: one for name, one in model.state_dict().items() if name not in tied}
    shapes = {name: tuple(one.shape) for name, one in as_stored(model, state).items()}
    return shapes, {**model.config.to_dict(), "architectures": [type(model).__name__]}


def described(text: str, model: Stored) -> Signature | TableError:
    """Return the signature that a table gives a model, or why it does not describe its tensors and their shapes."""
    try:
        return resolve(read_table(text, "inferred"), *model)
    except TableError as error:
        return error


def needs_all_layers(text: str, error: Signature | TableError) -> bool:
    """Return whether a table does not describe a model because this has other tensors, or layers of other sizes. Other
    sizes that do not fit are no matter here: some default configurations contradict themselves."""
    if isinstance(error, OtherSizes):
        spaces = read_table(text, "inferred").spaces
        return any("layer" in spaces[name].per for name in error.spaces)
    return isinstance(error, OtherTensors)


def refitted(text: str, model: Stored | None, *small: Traced | None) -> str:
    """Return a table with other expressions for sizes where these contradict the shapes of the model itself: numbers of
    a configuration may agree in all twins by chance. On the twins, the others have the same values. The same table is
    returned if none fit, as when a default configuration contradicts itself.

    model: None if the class refuses the configuration. small: its twins.
    """
    found, seen = text, set[frozenset[str]]()
    options: dict[str, list[str]] | None = None
    while model is not None and (wrong := _fit(found, model)[0]):
        options = options or _options(text, [twin for twin in small if twin is not None])
        seen.add(wrong)
        names = sorted(wrong & options.keys())
        choices = islice(product(*(options[name] for name in names)), CHOICES)
        tries = [_with_sizes(found, dict(zip(names, choice, strict=True))) for choice in choices]
        left = [(each, *_fit(each, model)) for each in tries]
        fitting = [(each, sizes) for each, still, sizes in left if not still]
        if any(sizes != fitting[0][1] for _, sizes in fitting):
            return text  # shapes do not tell which is right
        better = [each for each, _ in fitting] or [each for each, still, _ in left if still not in seen]
        if not better:
            return text
        found = better[0]
    return found


def _fit(text: str, model: Stored) -> tuple[frozenset[str], dict[str, int]]:
    """Return the spaces that do not fit a model, and the sizes of all. If an axis has another size than the table says,
    these are the spaces on it, otherwise those of size 0. There are none if all fit, or if sizes are not the cause."""
    found = described(text, model)
    if isinstance(found, TableError):
        return found.spaces if isinstance(found, OtherSizes) else frozenset(), {}
    spaces = found.spaces
    return frozenset(one.name for one in spaces.values() if not one.size), {
        key: one.size for key, one in spaces.items()
    }


def _options(text: str, small: Sequence[Traced]) -> dict[str, list[str]]:
    """Return the spaces whose sizes a table states, each with what it states and other expressions of that value."""
    files = [_file_of(twin.model, twin.tied) for twin in small]
    table = read_table(text, "inferred")
    spaces = [{space.name: space.size for space in resolve(table, *file).spaces.values()} for file in files]
    found = {}
    for name, stated in re.findall(r"(?m)^size (\w+) = (.*)$", text):
        sizes = tuple(each[name] for each in spaces if name in each)
        if len(sizes) == len(files):
            others = expressions(name, sizes, [config for _, config in files])
            found[name] = [stated, *islice((each for each in others if each != stated), OPTIONS - 1)]
    return found


def _with_sizes(text: str, sizes: Mapping[str, str]) -> str:
    """Return a table that states other expressions for some sizes."""
    for name, key in sizes.items():
        text = re.sub(rf"(?m)^size {name} = .*$", f"size {name} = {key}", text)
    return text
