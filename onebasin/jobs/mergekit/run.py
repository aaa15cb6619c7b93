# SPDX-License-Identifier: Apache-2.0
"""Handing a merge to mergekit: an optional dependency, called through its public functions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
import torch

from onebasin.models import Folder, ModelError
from onebasin.models.companions import copy_companions
from onebasin.models.errors import one_line
from onebasin.models.writer import bytes_of
from onebasin.settings import OutputSettings, refuse_unknown

from ..options import Options
from .schema import Recipe


def spec_of(method: str, own: Sequence[str]) -> Any:
    """Return mergekit's description of one of its methods.

    Raises ValueError if mergekit is not installed, and for a method that neither it nor onebasin (`own`) has.
    """
    try:
        from mergekit.merge_methods import registered_methods
    except ImportError:
        near = get_close_matches(method, own, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ValueError(f"merge_method '{method}'{hint} runs in mergekit, which is not installed: "
                         "pip install 'onebasin[mergekit]'") from None  # fmt: skip
    specs = {found.spec.name: found.spec for found in registered_methods()}
    refuse_unknown(() if method in specs else (method,), sorted({*specs, *own}), "merge_method")
    return specs[method]


def required_by(spec: Any) -> list[str]:
    """Return the parameters that a method of mergekit cannot do without, and `base_model` where it needs one."""
    parameters = (*spec.shared_parameters, *spec.input_parameters)
    base = ["base_model"] if spec.contract.base == "required" else []
    return base + [parameter.name for parameter in parameters if parameter.required]


def parameters_of(spec: Any) -> list[str]:
    """Return the names of the parameters of one of mergekit's methods."""
    return [parameter.name for parameter in (*spec.shared_parameters, *spec.input_parameters)]


def merge_in_mergekit(
    recipe: Recipe,
    places: Mapping[str, Path],
    folder: Path,
    layout: Path,
    opt: Options,
    look: OutputSettings,
) -> None:
    """Fill a folder with mergekit's `run_merge`. The caller's random number generators are left as they were.

    places: name in the file -> folder of that model. layout: the folder whose other files are copied. opt: gives the
    device and the seed. Raises ModelError where mergekit refuses the merge, or its output lacks a tensor.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    told = recipe.model_dump(exclude={"align", "random_seed", "out_shard_size"}, exclude_none=True)
    with own_random_numbers(opt.device):
        try:
            # The tokenizer's files are copied below. mergekit rewrites one, and logs a traceback where there is none.
            templated = look.copy_tokenizer and recipe.chat_template is not None
            options = MergeOptions(device=opt.device, out_shard_size=bytes_of(look.shard_size), random_seed=opt.seed,
                                   copy_tokenizer=templated, write_model_card=False, quiet=True)  # fmt: skip
            run_merge(MergeConfiguration.model_validate(_placed(told, places)), str(folder), options)
        except Exception as error:  # it raises errors of every kind
            raise ModelError(f"mergekit, {recipe.merge_method}: {one_line(error)}") from None
    copy_companions(layout, folder, look.copy_tokenizer)
    _refuse_missing(folder, layout, recipe)
    for name, text in look.files.items():
        (folder / name).write_text(text, "utf-8")


@contextmanager
def own_random_numbers(device: str) -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's generators after the block; mergekit seeds all of them."""
    drawn, arrays = random.getstate(), numpy.random.get_state()
    kind = torch.device(device)
    try:
        with torch.random.fork_rng([] if kind.type == "cpu" else [kind], device_type=kind.type):
            yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(arrays)


def _placed(told: Any, places: Mapping[str, Path]) -> Any:
    """Return the file's content with every model replaced by its folder, and without empty parameters."""
    if isinstance(told, list | tuple):
        return [_placed(item, places) for item in told]
    if not isinstance(told, dict):
        return told
    model = told.get("model")
    if isinstance(model, dict) and "path" in model:
        name = _name(model) + (f"+{_name(told['lora'])}" if told.get("lora") else "")
        rest = {key: value for key, value in told.items() if key == "override_architecture"}
        return {"model": {"path": str(places[name])}, **rest}
    return {key: _placed(value, places) for key, value in told.items() if value != {}}


def _name(place: Mapping[str, str]) -> str:
    return place["path"] + (f"@{place['revision']}" if place.get("revision") else "")


def _refuse_missing(folder: Path, layout: Path, recipe: Recipe) -> None:
    """Raise ModelError if a tensor of the layout is missing: mergekit writes only those that it knows."""
    if recipe.slices or recipe.modules:
        return
    with closing(Folder(layout)) as before, closing(Folder(folder)) as after:
        entries = before.signature.tensors.values()
        gone = [name for entry in entries if entry.alias is None for name in entry.names if name not in after.files]
    if gone:
        raise ModelError(f"mergekit leaves out '{gone[0]}' of this architecture; nothing was written")
