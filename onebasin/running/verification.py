# SPDX-License-Identifier: Apache-2.0
"""Comparing two model folders: as functions, by running their stock `transformers` classes on the same random inputs,
and as weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.engine import Means, in_order
from onebasin.models.errors import ModelError, one_line
from onebasin.models.folder import Folder
from onebasin.models.lazy_tensors import LazyTensors
from onebasin.models.model import View
from onebasin.models.weight_files import name_of
from onebasin.symmetry import Alignment
from onebasin.symmetry.exactness import departure
from onebasin.symmetry.tables.locate import some_of

from .classes import kind_of, seeded, without_cache
from .expert_layout import running_experts
from .float64 import throughout
from .loading import DoesNotRun, Made, held, streamed
from .probes import unpadded
from .valid_inputs import first_that_runs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAPPED = 1e-5  # largest difference due to rounding where tensors were multiplied by maps in float32
# Relative rounding error of a function whose weights were rounded once: see `tolerance_of`.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 8 * 2.0**-11,
    torch.bfloat16: 8 * 2.0**-8,
}
Side = tuple[Folder, Made | None]
INTERNAL = ("hidden_states", "attentions", "past_key_values", "encoder_last_hidden_state", "router", "cache")


@dataclass(frozen=True)
class Verification:
    """same: relative_difference <= tolerance. max_difference: the largest |a - b| of any output.

    relative_difference: the largest max |a - b| / max |a| of any output. outputs: the names of those compared. unused:
    weights that the class ignores in both folders, and that were not verified. beyond: whether an output is too small
    or too large for the dtype of the forward pass; folders are then run in float64.
    """

    same: bool
    max_difference: float
    relative_difference: float
    tolerance: float
    outputs: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    beyond: bool = False


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return the largest relative difference that rounding explains, for the coarsest of the dtypes.

    Rewriting a model multiplies its weights by matrices and rounds them again, so every weight of the copy has a
    relative error of at most the unit roundoff u (2^-11 for float16, 2^-8 for bfloat16), and of about 0.4 u in the root
    mean square. The errors are independent: a product with a matrix is off by about 0.4 u, n successive products by
    0.4 sqrt(n) u. 400 products, some 60 layers of six, give 8 u. A wrong map gives an error of order 1. The values for
    float32 and float64 allow for the arithmetic of the rewriting and of the forward pass, which outweighs the rounding
    of the weights at these precisions.
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

    All outputs that are not internal are compared: logits, poolings, and the last hidden state of models without a
    head. No code from the folders is run.

    Args:
        a: A model folder, or a hub id.
        b: Another.
        dtype: Of the forward passes.
        seed: Of the inputs.
        device: Where the models run.
        tolerance: Of the relative difference (default: what rounding explains, given how both are stored).

    Raises:
        ModelError: A folder does not load completely, or the two have no output in common.
    """
    folders = Folder(a), Folder(b)
    stored = (value for folder in folders for value in folder.dtypes.values())
    allowed = tolerance_of(dtype, *stored) if tolerance is None else tolerance
    sides = (folders[0], None), (folders[1], None)
    return _compared(sides, dtype, device, seed=seed, tolerance=allowed)


def compare_rewritten(
    original: Folder,
    rewritten: View,
    before: View | None = None,
    *,
    workers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float | None = None,
) -> Verification:
    """Compare a folder with a model that was rewritten from it and is not yet stored, as `compare` does.

    Args:
        original: The folder.
        rewritten: A view of it, whose tensors are computed in its own dtype.
        before: Another view of it, with which to compare, computed in that dtype, too (default: the folder as it is).
        workers: How many of the view's tensors are computed at a time.
        dtype: Of the forward passes.
        device: Where the models run.
        tolerance: Of the relative difference, as in `compare`.

    Raises:
        ModelError: As in `compare`.
    """

    def made(view: View) -> Made:
        return LazyTensors.of_model(view, rewritten.dtype, device, workers), view.raw_config

    first = None if before is None else made(before)
    return _compared(((original, first), (original, made(rewritten))), dtype, device, tolerance=tolerance)


def _compared(sides: tuple[Side, Side], dtype: torch.dtype, device: str, **how: Any) -> Verification:
    """Load two sides for `compare_models`, with all weights in memory only if they do not run otherwise."""

    def found(prepare: Callable[..., tuple[PreTrainedModel, set[str]]]) -> Verification:
        ready = [prepare(*side, dtype, device) for side in sides]
        for (folder, _), (model, unused), (_, other) in zip(sides, ready, reversed(ready), strict=True):
            if unused - other:
                raise ModelError(f"'{folder.name}': {kind_of(model)} does not use {some_of(sorted(unused - other))}")
        return replace(compare_models(ready[0][0], ready[1][0], **how), unused=tuple(sorted(ready[0][1])))

    try:
        verdict = found(streamed)
    except DoesNotRun:  # a kernel reads memory directly, say; an error of the models' own is raised again
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
    """Compare two loaded models on one device, as `compare` does. They are not changed.

    Args:
        a: A model.
        b: Another.
        batch: The number of inputs.
        length: Of texts, in tokens.
        seed: Of the inputs.
        tolerance: Of the relative difference (default: what rounding explains in their dtypes).

    Raises:
        ModelError: They have no output in common, or cannot be run on the inputs.
    """
    allowed = tolerance_of(a.dtype, b.dtype) if tolerance is None else tolerance
    _, given, ours = first_that_runs(a, b, batch, length, seed, lambda given: _outputs(a, given, seed))
    theirs = _outputs(b, given, seed)
    both = [name for name in ours if name in theirs]
    if not both:
        raise ModelError(f"the models have no output in common: {kind_of(a)} returns {', '.join(ours)}, "
                         f"{kind_of(b)} returns {', '.join(theirs)}")  # fmt: skip
    largest = relative = 0.0
    beyond = False
    for name in both:
        x, y = ours[name].double(), theirs[name].double()
        if x.shape != y.shape:
            raise ModelError(f"the models differ in the shape of '{name}': {tuple(x.shape)} and {tuple(y.shape)}")
        x, y = (unpadded(value, given.get("attention_mask")) for value in (x, y))
        if x.isnan().any():
            raise ModelError(f"'{name}' of the first model is NaN on random inputs in {name_of(a.dtype)}, so nothing "
                             "can be compared with it; its weights may be too large")  # fmt: skip
        difference = _largest(torch.where(x == y, 0.0, x - y))  # equal infinities are equal
        scale, kind = _largest(x[x.isfinite()]), torch.finfo(ours[name].dtype)
        beyond |= scale < kind.tiny / kind.eps or difference == inf
        largest = max(largest, difference)
        relative = max(relative, difference / scale if scale else (inf if difference else 0.0))
    return Verification(relative <= allowed, largest, relative, allowed, tuple(both), beyond=beyond)


@torch.no_grad()
def _outputs(model: PreTrainedModel, given: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return all floating-point outputs that are not internal, by name."""
    training = model.training
    try:
        with seeded(seed, model.device):
            model.train(False)
            found = output_of(model, given)
    except Exception as error:
        raise DoesNotRun(f"{kind_of(model)} cannot be run on random inputs: {one_line(error)}") from None
    finally:
        model.train(training)
    if not (shown := outward(found)):
        raise DoesNotRun(f"{kind_of(model)} returns nothing that can be compared")
    return shown


def output_of(model: PreTrainedModel, given: Mapping[str, Tensor]) -> Any:
    """Return the output of a model, computed in its dtype throughout and without caching."""
    with running_experts(model), throughout(model.dtype):
        return model(**given, **without_cache(model), return_dict=True)


def outward(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs to compare: floating-point tensors, without internal ones."""
    # Embeddings of texts and images are only compared with each other (CLIP): they may be rotated together.
    internal = (*INTERNAL, "_embeds") if "logits_per_image" in found else INTERNAL
    shown = {name: value for name, value in found.items() if not any(word in name for word in internal)}
    several = {f"{name}.{i}": each for name, value in shown.items() if isinstance(value, (tuple, list))
               for i, each in enumerate(value)}  # fmt: skip
    for named in (shown, several):  # several: heads of one name (MGP-STR)
        floats = {n: x for n, x in named.items() if isinstance(x, Tensor) and x.is_floating_point()}
        if floats:
            return floats
    return {}


def _largest(x: Tensor) -> float:
    value = float(x.abs().max()) if x.numel() else 0.0
    return value if value == value else inf  # NaN on one side only


def compare_tensors(
    a: Folder,
    b: Folder,
    alignment: Alignment | None = None,
    means: Means | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Compare the tensors of `b` with those of `a`, rewritten by `alignment`.

    Args:
        a: The original.
        b: Its copy.
        alignment: Maps that do not change the function (default: none), so that equal tensors imply equal functions.
        means: The type and device of the comparison, and how many tensors are compared at a time.
        tolerance: Of max |a - b| / max |a| in every tensor (default: half a unit in the last place of the coarser
            stored type, if the types differ, and the rounding of the maps).

    Raises:
        ModelError: The families differ.
        ValueError: The maps change the function.
    """
    if a.signature.family != b.signature.family:
        raise ModelError(f"'{a.name}' is of family {a.signature.family}, '{b.name}' of {b.signature.family}")
    means, mine, theirs = means or Means(), a.signature, b.signature
    mapped = alignment is not None and departure(mine, alignment.elements) <= MAPPED
    if alignment is not None and not mapped:
        raise ValueError("the maps of the alignment change the function")
    types = {a.stored_dtype, b.stored_dtype}
    rounding = max(torch.finfo(each).eps / 2 for each in types) if len(types) > 1 or mapped else 0.0
    allowed = max(rounding, MAPPED if mapped else 0.0) if tolerance is None else tolerance

    def differ(role: str) -> tuple[float, float]:
        if role not in mine.tensors or role not in theirs.tensors:
            return inf, inf
        x, y = (model.read(role, means.dtype, means.device) for model in (a, b))
        x = alignment.apply(mine, role, x) if alignment is not None else x
        if x.shape != y.shape:
            return inf, inf
        apart, scale = (float(t.abs().max()) if t.numel() else 0.0 for t in (x - y, x))
        return apart, apart / scale if scale else (inf if apart else 0.0)

    roles = list(dict.fromkeys([*mine.tensors, *theirs.tensors]))
    with torch.no_grad():
        found = list(in_order(differ, roles, means.workers))
    largest, relative = (max((pair[which] for pair in found), default=0.0) for which in (0, 1))
    return Verification(relative <= allowed, largest, relative, allowed, tuple(roles))
