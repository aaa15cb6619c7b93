# SPDX-License-Identifier: Apache-2.0
"""Loading a folder's model in its `transformers` class: complete, or without weights until they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from onebasin.models.errors import ModelError, one_line
from onebasin.models.folder import Folder
from onebasin.models.lazy_tensors import LazyTensors
from onebasin.symmetry.tables.locate import some_of

from .classes import class_for, class_of, config_of, kind_of, quietly, runnable, without_memory
from .expert_layout import one_by_one_where_needed
from .lazy_weights import await_weights, placed, stand_ins

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Instead = tuple[dict[str, Tensor], Mapping[str, Any]]  # tensors and config entries that replace a folder's
Made = tuple[LazyTensors, Mapping[str, Any]]  # the same, not computed yet
ROOM = 10**7  # parameters that a class may have beyond twice those in the weights
_DTYPE = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"


class DoesNotRun(ModelError):
    """A model does not run in the way it was loaded."""


def load(
    folder: Folder, dtype: torch.dtype, device: str = "cpu", instead: Instead | None = None, cls: Any = None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the folder's model, in eval mode, and the weights which its class ignores.

    Args:
        folder: The model folder.
        dtype: Of the parameters.
        device: Where it runs.
        instead: Tensors, by their names on disk, to load instead of the folder's, and entries to replace in the config.
        cls: Its class (default: the one that its config names).

    Raises:
        ModelError: It does not load, or weights that the class needs are missing.
    """
    model, unused = _complete(folder, dtype, instead, cls)
    module: nn.Module = model  # its `to` and `train` are typed
    module.to(device=device, dtype=dtype).train(False)
    one_by_one_where_needed(model)
    return model, unused


def pretrained(folder: str | Path, dtype: torch.dtype | None = None, device: str = "cpu") -> PreTrainedModel:
    """Return the model of a folder in the class its config names.

    Args:
        folder: A model folder, or a hub id.
        dtype: Of the parameters (default: the one that most are stored in).
        device: Where it runs.

    Raises:
        ModelError: It does not load, or weights that the class needs are missing.
    """
    checkpoint = Folder(folder)
    return load(checkpoint, dtype or checkpoint.stored_dtype, device)[0]


def refuse_contradiction(folder: Folder) -> None:
    """Raise ModelError if a tensor does not have its shape by config.json. No weights are read, no memory is taken."""
    cls = class_of(folder)
    if not hasattr(cls, "config_class"):
        return
    try:
        needed = _shapes(cls, config_of(folder))
    except Exception as error:  # each model class fails in its own way
        raise ModelError(f"'{folder.name}' does not load: {one_line(error)}") from None
    stem = f"{cls.base_model_prefix}."
    for name, held in folder.shapes.items():
        known = next((needed[one] for one in (name, stem + name, name.removeprefix(stem)) if one in needed), held)
        if known != tuple(held):  # a name that the class does not have is one that it converts
            raise _contradiction(folder.name, name, held, cls, known)


def refuse_lacking(folder: Folder) -> None:
    """Raise ModelError if the class needs a tensor that is missing, or cannot be built. No weights are read."""
    like = {name: folder.read_name(name) for name in folder.files}
    _complete(folder, folder.stored_dtype, ({**like, **stand_ins(like, folder.stored_dtype)}, {}))


def refuse_larger(name: str, cls: Any, config: PretrainedConfig, held: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if a model would be far larger than its weights, because of a broken config.

    It would first be filled with random numbers, for minutes, or take all memory.

    cls: its class, which is built without allocating memory. held: name -> shape of the weights.
    """
    largest = max((length for shape in held.values() for length in shape), default=0)
    if _largest_in(config.to_dict()) <= largest or not hasattr(cls, "config_class"):
        return
    built = _shapes(cls, config)
    if sum(map(prod, built.values())) > 2 * sum(map(prod, held.values())) + ROOM:
        key = max(built, key=lambda key: prod(built[key]) if built[key] != held.get(key) else 0)
        other = f"has shape {held[key]}" if key in held else "is not there"
        raise ModelError(f"'{name}': '{key}' {other}, and {cls.__name__} needs {built[key]} by config.json")


def _largest_in(value: Any) -> int:
    """Return the largest integer in a configuration."""
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return max(map(_largest_in, inside), default=0)
    return value if isinstance(value, int) else 0


def _shapes(cls: Any, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a class, which is built without allocating memory."""
    return {key: tuple(tensor.shape) for key, tensor in without_memory(cls, config).state_dict().items()}


def _contradiction(folder: str, name: str, held: Collection[int], cls: Any, needed: Collection[int]) -> ModelError:
    return ModelError(f"'{folder}': '{name}' has shape {tuple(held)}, and {cls.__name__} needs {tuple(needed)} by "
                      "config.json")  # fmt: skip


def held(folder: Folder, instead: Made | None, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, set[str]]:
    """Return the result of `load`, for the folder or for the tensors that replace its own."""
    return load(folder, dtype, device, ({**folder.ignored(), **dict(instead[0])}, instead[1]) if instead else None)


def streamed(folder: Folder, instead: Made | None, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, set[str]]:
    """Return the same, but with weights that are read or computed when they are used, only for running the model.

    Parameters that the class assembles from several tensors are in memory. Raises DoesNotRun for a class that keeps
    copies of tensors, in addition to the errors of `load`.
    """
    whole, updates = instead or (None, {})
    like = whole.like if whole else {name: folder.read_name(name) for name in folder.files}
    one = whole.one if whole else folder.read_name

    def make(name: str) -> Tensor:
        return one(name).to(device, dtype if like[name].is_floating_point() else None)

    given = stand_ins(like, dtype)
    fixed = folder.ignored() if whole else {}
    model, unused = _complete(folder, dtype, ({**fixed, **like, **given}, updates))
    other = like.keys() - placed(model, given) - unused
    if other:
        given = {name: tensor for name, tensor in given.items() if name not in other}
        real = whole.some(other) if whole else {name: like[name] for name in other}
        model, unused = _complete(folder, dtype, ({**fixed, **given, **real}, updates))
    if not await_weights(model, given, make, dtype, device):
        raise DoesNotRun(f"'{folder.name}': {kind_of(model)} keeps copies of what it loads")
    model.train(False)
    return model, unused


def _complete(
    folder: Folder, dtype: torch.dtype, instead: Instead | None, cls: Any = None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model with all weights that its class needs, and the names of those that it ignores."""
    assert folder.config and folder.shapes  # raises ModelError for a damaged folder
    runnable(folder)
    try:
        tensors, updates = instead or ({}, {})
        config = config_of(folder, updates)
        held = {name: tuple(tensor.shape) for name, tensor in tensors.items()} or folder.shapes
        refuse_larger(folder.name, cls or class_for(config, folder.files), config, held)
        model, info = built(folder, dtype, instead, cls)
    except ModelError:
        raise
    except Exception as error:  # each model class fails in its own way
        raise ModelError(f"'{folder.name}' does not load: {one_line(error)}") from None
    if info["missing_keys"]:
        raise ModelError(f"'{folder.name}': {kind_of(model)} needs {some_of(sorted(info['missing_keys']))}, "
                         "which the weights lack")  # fmt: skip
    return model, set(info["unexpected_keys"])


def built(
    folder: Folder, dtype: torch.dtype, instead: Instead | None, cls: Any = None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a folder's model, and the loader's report on the tensors.

    A pooler that the weights lack is left out if the class can do without it. The arguments are those of `load`.
    """
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder.folder, "local_files_only": True}
    if instead is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": instead[0]}
    updates = instead[1] if instead is not None else {}
    config = config_of(folder, updates)
    cls = cls or class_for(config, folder.files)
    options |= {_DTYPE: dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quietly(), _no_exceptions(cls, dtype):
        model, info = cls.from_pretrained(**source, config=config, **options)
        if info["missing_keys"] and all("pooler." in name for name in info["missing_keys"]):
            options["add_pooling_layer"] = False
            model, info = cls.from_pretrained(**source, config=config, **options)
    for name, held, needed in sorted(info["mismatched_keys"]):
        raise _contradiction(folder.name, name, held, type(model), needed)
    return model.to(dtype), info


@contextmanager
def _no_exceptions(cls: Any, dtype: torch.dtype) -> Iterator[None]:
    """Load every parameter in `dtype`. Some classes keep layers in float32 (T5's `wo`), others declare parameters in it
    (DeBERTa's and XLNet's biases), to which the loader would round even in a comparison in float64."""
    kept = getattr(cls, "_keep_in_fp32_modules", None)
    build = cls.__init__

    @wraps(build)
    def built(model: nn.Module, *args: Any, **options: Any) -> None:
        build(model, *args, **options)
        for module in model.modules():
            for name, held in module._parameters.items():
                if held is not None and held.is_floating_point() and held.dtype != dtype:
                    module._parameters[name] = nn.Parameter(held.to(dtype), held.requires_grad)

    cls.__init__ = built
    if kept is not None:
        cls._keep_in_fp32_modules = None
    try:
        yield
    finally:
        cls.__init__ = build
        if kept is not None:
            cls._keep_in_fp32_modules = kept
