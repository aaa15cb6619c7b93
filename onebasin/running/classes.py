# SPDX-License-Identifier: Apache-2.0
"""The class of `transformers` that runs a folder's model, and how to call it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig

from onebasin.models.errors import ModelError, one_line
from onebasin.models.folder import Folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def has_class(folder: Folder) -> bool:
    """Return whether `transformers` has a class that runs models of this type."""
    return folder.raw_config["model_type"] in CONFIG_MAPPING


def runnable(folder: Folder) -> None:
    """Raise ModelError if `transformers` has no class that runs models of this type."""
    kind = folder.raw_config["model_type"]
    if not has_class(folder):
        raise ModelError(f"'{folder.name}' is of type '{kind}', for which transformers has no class, so it cannot be "
                         "run to verify it; skip that with --no-verify")  # fmt: skip


def config_of(folder: Folder, updates: Mapping[str, Any] | None = None) -> Any:
    """Return a folder's configuration as an object of its class, with some entries changed."""
    return CONFIG_MAPPING[folder.raw_config["model_type"]].from_dict({**folder.raw_config, **(updates or {})})


def class_of(folder: Folder) -> Any:
    """Return the class that runs a folder's model. The first call imports the modeling code of transformers."""
    return class_for(config_of(folder), folder.files)


def class_for(config: PretrainedConfig, names: Collection[str] = ()) -> Any:
    """Return the class that runs a model: the one named in its config, else the one whose tensors are most nearly
    called `names`, else that of the bare model."""
    stated = getattr(config, "architectures", None) or [""]
    if found := exported(stated[0]):
        return found
    classes = classes_of(type(config))
    if names and classes:
        return min(classes, key=lambda cls: _unlike(cls, config, names))
    return classes[0] if classes else AutoModel


def exported(name: object) -> type[PreTrainedModel] | None:
    """Return the model class of this name that transformers exports, if there is one."""
    from transformers import PreTrainedModel

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def type_of_class(name: str) -> str | None:
    """Return the model type whose configuration the class of this name takes, if both are known to transformers."""
    kind = getattr(getattr(exported(name), "config_class", None), "model_type", None)
    return kind if kind in CONFIG_MAPPING else None


def neither_folder_nor_type(name: str) -> str:
    """Return the message for a name that is neither: it has the type of a class, or else the types named most alike."""
    of_class = type_of_class(name)
    near = [of_class] if of_class else get_close_matches(name.lower(), list(CONFIG_MAPPING), n=3, cutoff=0.4)
    hint = f"; nearest types: {', '.join(near)}" if near else ""
    return f"'{name}' is neither a model folder nor a model type of transformers{hint}"


def modeling_of(kind: type) -> ModuleType:
    """Return the module of the classes for a configuration, which lies beside its own. Raises ImportError if there is
    none."""
    return import_module(kind.__module__.replace(".configuration_", ".modeling_"))


def unregistered(config: PretrainedConfig) -> list[str]:
    """Return the names of the classes for a configuration that transformers has in the module beside it but does not
    register, such as the towers of multimodal models. A class comes before those that are defined above it, which it
    may contain."""
    from transformers import PreTrainedModel

    kind = type(config)
    try:
        module = modeling_of(kind)
    except ImportError:  # there is none, or it needs a package that is missing
        return []
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [each.__name__ for each in reversed(own) if issubclass(each, PreTrainedModel)
            and each.config_class is kind and each.forward is not nn.Module.forward]  # fmt: skip


def located_message(error: Exception) -> str:
    """Return an error's message in one line, with the last place in the code of transformers that led to it."""
    place = ""
    for frame, number in walk_tb(error.__traceback__):
        file, owner = Path(frame.f_code.co_filename), frame.f_locals.get("self")
        if "transformers" in file.parts:
            method = f"{type(owner).__name__}." if owner is not None else ""
            place = f" in {method}{frame.f_code.co_name} ({file.name}, line {number})"
    return one_line(error) + place


def classes_of(kind: type[PretrainedConfig]) -> list[Any]:
    """Return the classes that transformers registers for a configuration, or a program with its Auto classes: the bare
    model, then those with a head."""
    from transformers.models.auto import modeling_auto

    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch("MODEL_FOR_.*_MAPPING", name)]
    found = [mapping.get(kind, None) for mapping in (transformers.MODEL_MAPPING, *mappings)]
    return list(dict.fromkeys(cls for cls in found if isinstance(cls, type)))


def _unlike(cls: Any, config: PretrainedConfig, names: Collection[str]) -> int:
    """Return the number of tensors that only the class or only the file has. No memory is allocated for them."""
    try:
        own = without_memory(cls, config).state_dict().keys()
    except Exception:  # a class for another use of this type
        return len(names) + 1
    return len(own ^ set(names))


def without_memory(cls: Any, config: PretrainedConfig) -> Any:
    """Return a model of a class whose tensors are on the device meta: names and shapes, without values."""
    with torch.device("meta"), quietly():
        return cls(deepcopy(config))


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return the arguments of `forward` that say not to cache: none for a model without caches.

    It takes `use_cache` by name, or among the keywords of newer releases, which reach the modules inside. Where one of
    these says itself what the next one does (Mimi, T5Gemma), it would be given twice.
    """
    by_name, through, _ = _of_cache(type(model).forward)
    passed = through and not any(_of_cache(type(module).forward)[2] for module in model.modules())
    return {"use_cache": False} if hasattr(model.config, "use_cache") and (by_name or passed) else {}


@cache
def _of_cache(forward: Callable[..., Any]) -> tuple[bool, bool, bool]:
    """Return whether a `forward` takes `use_cache` by name, takes any keywords, and passes these on beside its own."""
    accepted = inspect.signature(forward).parameters
    by_name = "use_cache" in accepted
    through = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    if by_name or not through:
        return by_name, through, False
    words = inspect.unwrap(forward).__code__.co_consts  # keywords of its calls are among them, alone or in tuples
    return by_name, through, any("use_cache" in (one if isinstance(one, tuple) else (one,)) for one in words)


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's random numbers for the block, such as those that a class draws (ViTMAE, what it masks), and restore
    their state after it."""
    kind = torch.device(device)
    with torch.random.fork_rng([] if kind.type == "cpu" else [kind], device_type=kind.type):
        if kind.type == "cpu":
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also seeds every other device
        else:
            torch.manual_seed(seed)
        yield


def kind_of(model: PreTrainedModel) -> str:
    return type(model).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the loader's progress bars and its report, which callers turn into errors."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
