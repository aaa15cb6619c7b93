# SPDX-License-Identifier: Apache-2.0
"""Do two model folders compute the same function? Asked of the stock `transformers` classes, at random."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import wraps
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig

from onebasin.models.folder import Folder, ModelError, one_line
from onebasin.models.lazy_tensors import LazyTensors
from onebasin.models.model import Model

from .expert_layout import one_by_one_where_needed, running_experts
from .float64 import throughout
from .lazy_weights import await_weights, placed, stand_ins
from .probes import probe, unpadded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative rounding error of a function whose weights were rounded once, see `tolerance_of`.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 8 * 2.0**-11,
    torch.bfloat16: 8 * 2.0**-8,
}
Instead = tuple[dict[str, Tensor], Mapping[str, Any]]  # tensors and config that take the place of a folder's
Made = tuple[LazyTensors, Mapping[str, Any]]  # the same, not made yet
Side = tuple[Folder, Made | None]
ROOM = 10**7  # numbers that a class may have besides twice those that the weights hold
_INTERNAL = ("hidden_states", "attentions", "past_key_values", "encoder_last_hidden_state", "router")


class DoesNotRun(ModelError):
    """A model does not run as it was prepared."""


@dataclass(frozen=True)
class Verification:
    """same: relative_difference <= tolerance. max_difference: the largest |a - b| of any output.

    relative_difference: the largest over the outputs of max |a - b| / max |a|. outputs: what was compared.
    unused: weights that the class of the config loads from neither folder, and that were not verified. beyond: whether
    an output is too small or too large for the dtype of the forward pass to tell much; folders are then run in float64.
    """

    same: bool
    max_difference: float
    relative_difference: float
    tolerance: float
    outputs: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    beyond: bool = False


def tolerance_of(*dtypes: torch.dtype) -> float:
    """The relative difference that rounding explains, for the coarsest of the dtypes.

    Rewriting a model multiplies its weights by matrices and rounds them again, so every weight of the copy
    has a relative error of at most the unit roundoff u (2^-11 for float16, 2^-8 for bfloat16), and of about
    0.4 u in the root mean square. The errors are independent: a product with a matrix is off by about 0.4 u,
    n products in a row by 0.4 sqrt(n) u. 8 u is what 400 products in a row explain, some 60 layers of six.
    A wrong map differs by order 1. float32 and float64 leave room for the arithmetic of the rewriting and of
    the forward pass, which at these precisions outweighs the rounding of the weights.
    """
    return max(TOLERANCE[dtype] for dtype in dtypes)


def compare(
    a: str | Path,
    b: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    tolerance: float | None = None,
) -> Verification:
    """Compare the outputs of two model folders for the same random inputs.

    Everything that is not internal is compared: logits, poolings, and the last hidden state of models without a head.
    No code from the folders is run.

    Args:
        a: A model folder.
        b: Another.
        dtype: Of the forward pass.
        seed: Of the inputs, which fit both models.
        device: Where the models run.
        tolerance: Of the relative difference (default: what rounding explains, given how both are stored).

    Raises:
        ModelError: A folder does not load whole, or the two have no output in common.
    """
    folders = Folder(a), Folder(b)
    stored = (value for folder in folders for value in folder.dtypes.values())
    allowed = tolerance_of(dtype, *stored) if tolerance is None else tolerance
    sides = (folders[0], None), (folders[1], None)
    return _compared(sides, dtype, device, seed=seed, tolerance=allowed)


def compare_rewritten(
    original: Folder,
    rewritten: Model,
    *,
    arithmetic: torch.dtype = torch.float32,
    workers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float | None = None,
) -> Verification:
    """Compare a folder with the model that is to be written from it, as `compare` does.

    Args:
        original: The folder.
        rewritten: A view of it.
        arithmetic: The dtype in which the view's tensors are made.
        workers: How many of them are made at a time.
        dtype: Of the forward passes.
        device: Where the models run.
        tolerance: Of the relative difference.

    Raises:
        ModelError: As in `compare`.
    """
    made = LazyTensors.of_model(rewritten, arithmetic, device, workers), rewritten.raw_config
    return _compared(((original, None), (original, made)), dtype, device, tolerance=tolerance)


def _compared(sides: tuple[Side, Side], dtype: torch.dtype, device: str, **how: Any) -> Verification:
    """`compare_models` of two sides, which are held only where they do not run otherwise."""

    def found(prepare: Callable[..., tuple[PreTrainedModel, set[str]]]) -> Verification:
        ready = [prepare(*side, dtype, device) for side in sides]
        for (folder, _), (model, unused), (_, other) in zip(sides, ready, reversed(ready), strict=True):
            if unused - other:
                raise ModelError(f"'{folder.name}': {_kind(model)} does not use {_some(unused - other)}")
        return replace(compare_models(ready[0][0], ready[1][0], **how), unused=tuple(sorted(ready[0][1])))

    try:
        verdict = found(streamed)
    except DoesNotRun:  # a kernel that looks into memory by itself, say: held they run, or the error is their own
        verdict = found(held)
    if verdict.beyond and dtype != torch.float64:
        return _compared(sides, torch.float64, device, **how)
    return verdict


def compare_models(
    a: PreTrainedModel,
    b: PreTrainedModel,
    *,
    batch: int = 4,
    length: int = 16,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Compare two loaded models on one device, as `compare` does. They are left as they were found.

    Args:
        a: A model.
        b: Another.
        batch: How many inputs.
        length: Of texts, in tokens.
        seed: Of the inputs.
        tolerance: Of the relative difference.

    Raises:
        ModelError: They have no output in common, or cannot be run on the inputs.
    """
    allowed = tolerance_of(a.dtype, b.dtype) if tolerance is None else tolerance
    given = probe(a, b, batch, length, seed)
    ours, theirs = _outputs(a, given, seed), _outputs(b, given, seed)
    both = [name for name in ours if name in theirs]
    if not both:
        raise ModelError(f"the models have no output in common: {_kind(a)} gives {', '.join(ours)}, "
                              f"{_kind(b)} gives {', '.join(theirs)}")  # fmt: skip
    largest = relative = 0.0
    beyond = False
    for name in both:
        x, y = ours[name].double(), theirs[name].double()
        if x.shape != y.shape:
            raise ModelError(f"the models differ in the shape of '{name}': {tuple(x.shape)} and "
                                  f"{tuple(y.shape)}")  # fmt: skip
        x, y = (unpadded(value, given.get("attention_mask")) for value in (x, y))
        if x.isnan().any():
            raise ModelError(f"the first model's own '{name}' is NaN on random inputs in {str(a.dtype)[6:]}, so "
                             "nothing can be compared with it; its weights may be too large")  # fmt: skip
        difference = _largest(torch.where(x == y, 0.0, x - y))  # equal infinities are equal
        scale, kind = _largest(x[x.isfinite()]), torch.finfo(ours[name].dtype)
        beyond |= scale < kind.tiny / kind.eps or difference == inf
        largest = max(largest, difference)
        relative = max(relative, difference / scale if scale else (inf if difference else 0.0))
    return Verification(relative <= allowed, largest, relative, allowed, tuple(both), beyond=beyond)


def has_class(folder: Folder) -> bool:
    """Return whether `transformers` has a class that runs models of this type."""
    return folder.raw_config["model_type"] in CONFIG_MAPPING


def runnable(folder: Folder) -> None:
    """Raise ModelError where `transformers` has no class that runs models of this type."""
    kind = folder.raw_config["model_type"]
    if not has_class(folder):
        raise ModelError(f"'{folder.name}' is of type '{kind}', which transformers has no class for, so it "
                              "cannot be run to verify it; --no-verify does without")  # fmt: skip


def class_of(folder: Folder) -> Any:
    """The class that runs a folder's model; the first time, all that runs models is imported with it."""
    return _class(config_of(folder), folder.files)


def load(
    folder: Folder, dtype: torch.dtype, device: str = "cpu", instead: Instead | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the folder's model in the class its config names, in eval mode, and the weights that class leaves out.

    Args:
        folder: The model folder.
        dtype: Of the parameters.
        device: Where it runs.
        instead: Tensors by their names on disk that are loaded instead of the folder's, and what the config says
            besides.

    Raises:
        ModelError: It does not load, or weights that the class needs are missing.
    """
    model, unused = _complete(folder, dtype, instead)
    module: nn.Module = model  # whose `to` and `eval` are typed
    module.to(device=device, dtype=dtype).train(False)
    one_by_one_where_needed(model)
    return model, unused


def refuse_contradiction(folder: Folder) -> None:
    """Raise ModelError where a tensor has another shape than config.json says; no weight is read, no memory taken.

    Args:
        folder: Of a type that transformers has a class for.
    """
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
    """Raise ModelError where the class needs a tensor that the weights lack, or cannot be built; no weight is read.

    Args:
        folder: Of a type that transformers has a class for.
    """
    like = {name: folder.read_name(name) for name in folder.files}
    _complete(folder, folder.stored_dtype, ({**like, **stand_ins(like, folder.stored_dtype)}, {}))


def _shapes(cls: Any, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a class, which is built without numbers."""
    with torch.device("meta"), _quietly():
        return {key: tuple(tensor.shape) for key, tensor in cls(deepcopy(config)).state_dict().items()}


def _contradiction(folder: str, name: str, held: Collection[int], cls: Any, needed: Collection[int]) -> ModelError:
    return ModelError(f"'{folder}': '{name}' has shape {tuple(held)}, and {cls.__name__} needs {tuple(needed)} by "
                      "config.json")  # fmt: skip


def held(folder: Folder, instead: Made | None, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, set[str]]:
    """Return the result of `load`, for the folder or for the tensors that take the place of its own."""
    return load(folder, dtype, device, (dict(instead[0]), instead[1]) if instead else None)


def streamed(folder: Folder, instead: Made | None, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, set[str]]:
    """Return the same without weights, which are read or made when they are used; it is for running alone.

    What the class puts together from several tensors is held. Raises DoesNotRun for a class that keeps copies, besides
    the errors of `load`.
    """
    whole, updates = instead or (None, {})
    like = whole.like if whole else {name: folder.read_name(name) for name in folder.files}
    one = whole.one if whole else folder.read_name

    def make(name: str) -> Tensor:
        return one(name).to(device, dtype if like[name].is_floating_point() else None)

    given = stand_ins(like, dtype)
    model, unused = _complete(folder, dtype, ({**like, **given}, updates))
    other = like.keys() - placed(model, given) - unused
    if other:
        given = {name: tensor for name, tensor in given.items() if name not in other}
        real = whole.some(other) if whole else {name: like[name] for name in other}
        model, unused = _complete(folder, dtype, ({**given, **real}, updates))
    if not await_weights(model, given, make, dtype, device):
        raise DoesNotRun(f"'{folder.name}': {_kind(model)} keeps copies of what it loads")
    model.train(False)
    return model, unused


def _complete(folder: Folder, dtype: torch.dtype, instead: Instead | None) -> tuple[PreTrainedModel, set[str]]:
    """The model with all weights that its class needs, and the names of those that it leaves out."""
    assert folder.config and folder.shapes  # refuses a damaged folder in one sentence
    runnable(folder)
    try:
        tensors, updates = instead or ({}, {})
        config = config_of(folder, updates)
        held = {name: tuple(tensor.shape) for name, tensor in tensors.items()} or folder.shapes
        refuse_larger(folder.name, _class(config, folder.files), config, held)
        model, info = built(folder, dtype, instead)
    except ModelError:
        raise
    except Exception as error:  # each model class fails in its own way
        raise ModelError(f"'{folder.name}' does not load: {one_line(error)}") from None
    if info["missing_keys"]:
        raise ModelError(f"'{folder.name}': {_kind(model)} needs {_some(info['missing_keys'])}, "
                              "which the weights lack")  # fmt: skip
    return model, set(info["unexpected_keys"])


def refuse_larger(name: str, cls: Any, config: PretrainedConfig, held: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError where a class would be far larger than the weights that there are for it, by a broken config.

    It would be filled with random numbers first, for minutes, or take all memory.

    Args:
        name: what the model is called.
        cls: the class that is to be loaded; it is built without numbers.
        config: its configuration.
        held: name -> shape of the weights.
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
    """The largest whole number in a configuration."""
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return max(map(_largest_in, inside), default=0)
    return value if isinstance(value, int) else 0


def load_model(folder: str | Path, dtype: torch.dtype | None = None, device: str = "cpu") -> PreTrainedModel:
    """Return the model of a folder in the class its config names; dtype None keeps the stored one."""
    checkpoint = Folder(folder)
    return load(checkpoint, dtype or checkpoint.stored_dtype, device)[0]


def config_of(folder: Folder, updates: Mapping[str, Any] | None = None) -> Any:
    """Return a folder's configuration as its class has it, with some entries changed."""
    return CONFIG_MAPPING[folder.raw_config["model_type"]].from_dict({**folder.raw_config, **(updates or {})})


def built(
    folder: Folder, dtype: torch.dtype, instead: Instead | None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a folder's model in its class, and what the loader says of the tensors.

    A pooler that the weights lack is left out, where the class can do without. The arguments are those of `load`.
    """
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder.folder, "local_files_only": True}
    if instead is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": instead[0]}
    updates = instead[1] if instead is not None else {}
    cls = _class(config_of(folder, updates), folder.files)
    options |= {_DTYPE: dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _quietly(), _no_exceptions(cls, dtype):
        model, info = cls.from_pretrained(**source, config=config_of(folder, updates), **options)
        if info["missing_keys"] and all("pooler." in name for name in info["missing_keys"]):
            options["add_pooling_layer"] = False
            model, info = cls.from_pretrained(**source, config=config_of(folder, updates), **options)
    for name, held, needed in sorted(info["mismatched_keys"]):
        raise _contradiction(folder.name, name, held, type(model), needed)
    return model.to(dtype), info


@contextmanager
def _no_exceptions(cls: Any, dtype: torch.dtype) -> Iterator[None]:
    """Load every parameter in `dtype`: some classes keep layers in float32 (T5's `wo`), others declare parameters of it
    (DeBERTa's and XLNet's biases), to which the loader rounds; a float64 comparison must not see that."""
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


_DTYPE = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"


def _class(config: PretrainedConfig, names: Collection[str] = ()) -> Any:
    """The class that runs a model: the one that its config names, else the one whose tensors are called `names`, else
    the bare model's."""
    from transformers import PreTrainedModel

    stated = getattr(config, "architectures", None) or [""]
    found = getattr(transformers, str(stated[0]), None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    classes = _classes(type(config))
    if names and classes:
        return min(classes, key=lambda cls: _unlike(cls, config, names))
    return classes[0] if classes else AutoModel


def _classes(kind: type[PretrainedConfig]) -> list[Any]:
    """The classes of a model type: the bare model, then those with a head, as the library's automatic classes know."""
    from transformers.models.auto import modeling_auto

    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch("MODEL_FOR_.*_MAPPING", name)]
    found = [mapping.get(kind, None) for mapping in (transformers.MODEL_MAPPING, *mappings)]
    return list(dict.fromkeys(cls for cls in found if isinstance(cls, type)))


def _unlike(cls: Any, config: PretrainedConfig, names: Collection[str]) -> int:
    """How many tensors only one of the two has, the class or the file. Nothing is allocated."""
    try:
        with torch.device("meta"):
            own = cls(deepcopy(config)).state_dict().keys()
    except Exception:  # a class for another use of this type
        return len(names) + 1
    return len(own ^ set(names))


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether `forward` can be told not to cache: by name, or through the keywords of newer releases."""
    accepted = inspect.signature(model.forward).parameters
    through = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    return hasattr(model.config, "use_cache") and ("use_cache" in accepted or through)


@torch.no_grad()
def _outputs(model: PreTrainedModel, given: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """All floating-point outputs that are not internal, by name."""
    cache = {"use_cache": False} if takes_cache(model) else {}
    training = model.training
    cpu_and_device = [model.device] if model.device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices=cpu_and_device, device_type=model.device.type):
            torch.manual_seed(seed)  # for models that draw a mask of their own
            model.train(False)
            with running_experts(model), throughout(model.dtype):
                found = model(**given, **cache, return_dict=True)
    except Exception as error:
        raise DoesNotRun(f"{_kind(model)} cannot be run on random inputs: {one_line(error)}") from None
    finally:
        model.train(training)
    return outward(found)


def outward(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs that are compared: floating-point tensors, without those that only join the model's parts."""
    # Embeddings of texts and images are compared with each other alone (CLIP): they may turn together.
    internal = (*_INTERNAL, "_embeds") if "logits_per_image" in found else _INTERNAL
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not any(word in name for word in internal)
    }


def _largest(x: Tensor) -> float:
    value = float(x.abs().max()) if x.numel() else 0.0
    return value if value == value else inf  # NaN on one side only


def _kind(model: PreTrainedModel) -> str:
    return type(model).__name__


def _some(names: set[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the loader's progress bars and report, which this module turns into errors."""
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
