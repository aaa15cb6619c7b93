# SPDX-License-Identifier: Apache-2.0
"""Writing the output of a job: verified first, with a model card and a record beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.engine import Placing, meanwhile
from onebasin.models import (
    Canonical,
    Folder,
    LazyTensors,
    Model,
    ModelError,
    Rewritten,
    Target,
    View,
    model_card,
    provenance,
    write_into,
)
from onebasin.models.card import hashes
from onebasin.models.outputs import model_folder
from onebasin.models.weight_files import clearly
from onebasin.running import Verification, compare_rewritten, tolerance_of
from onebasin.running.classes import class_of, has_class, runnable
from onebasin.running.loading import refuse_contradiction, refuse_lacking
from onebasin.running.trial import TOLERANCE as TWIN_TOLERANCE
from onebasin.running.trial import departure_on_twin, even_form
from onebasin.symmetry import Alignment
from onebasin.symmetry.exactness import departure

from .aligning import AlignedPair, refuse_beyond
from .options import Options, Tell, stored_dtype, verification

EXACT = 1e-5  # relative departure of a map from its group that float32 rounding explains

# A relative difference that float64 brings below this was rounding in float32; that of a wrong map remains.
ROUNDED = 1e-6


def tensors_of(model: Model, opt: Options, dtype: torch.dtype | None = None) -> LazyTensors:
    """Return the tensors of a model, computed in `dtype` (default: as the options say). A tensor that nothing moves
    keeps its exact bits."""
    made = LazyTensors.of_model(model, dtype or opt.dtype, opt.device, opt.workers, opt.ray)
    return replace(made, make=partial(_made_whole, model, made.make))


def _made_whole(
    model: Model, make: Callable[[tuple[str, ...]], Mapping[str, Tensor]], roles: tuple[str, ...]
) -> Mapping[str, Tensor]:
    """Make tensors. Raises ModelError if the numbers of one are so small that storing rounds them by more than
    verification allows.

    16-bit types count as float32: their rounding is not held against a rewriting.
    """
    made, origin = make(roles), model.origin
    kind = max(origin.stored_dtype, torch.float32, key=lambda each: each.itemsize)
    least = torch.finfo(kind).tiny * torch.finfo(kind).eps / tolerance_of(kind)
    for role, tensor in made.items():
        size = max(map(abs, map(float, tensor.aminmax()))) if tensor.is_floating_point() and tensor.numel() else 0.0
        if not 0 < size < least:
            continue
        known = origin.signature is not None and role in origin.signature.tensors
        if known and torch.equal(tensor.cpu().flatten().sort()[0], origin.read(role, tensor.dtype).flatten().sort()[0]):
            continue  # at most reordered
        raise ModelError(
            f"the rewritten tensor '{model.signature.tensors[role].name}' of '{model.name}' has no number above "
            f"{size:.3g}, of which {str(kind).removeprefix('torch.')} holds few digits; scale the model up first"
        )
    return made


def refuse_unverifiable(checkpoint: Folder, how: bool | str, moves: bool = True) -> None:
    """Raise ModelError, before any work, where a model could not be verified; a missing table is reported first.

    Args:
        checkpoint: The model.
        how: See `verification`; with `none` nothing is refused.
        moves: Whether it will be rewritten and so, with `outputs`, run. A model that is not run must still agree with
            its config.json, where transformers has a class for it.
    """
    if verification(how) == "none":
        return
    assert checkpoint.signature
    if moves and verification(how) == "outputs":
        runnable(checkpoint)
    elif has_class(checkpoint):
        refuse_contradiction(checkpoint)


def refuse_incomplete(template: Folder) -> None:
    """Raise ModelError where the template of a merge lacks a tensor: no other model can supply it, and the output would
    not load. A type that transformers has no class for is not checked."""
    if not has_class(template):
        return
    try:
        refuse_lacking(template)
    except ModelError as error:
        raise ModelError(f"{error}; --match none --no-verdict merges what is there") from None


def ready_to_run(models: Sequence[Folder]) -> AbstractContextManager[object]:
    """Import the models' classes, which takes about two seconds, in the background of the block."""
    return meanwhile(lambda _: [class_of(model) for model in models])


def verified(
    original: Folder,
    model: Rewritten[Alignment],
    opt: Options,
    tell: Tell | None,
    how: bool | str = "outputs",
) -> tuple[Rewritten[Alignment], float | None]:
    """Return a rewritten model and the largest difference of its outputs. Raises ModelError for more than rounding.

    how: see `verification`; where the models are not run, the difference is None. With `outputs` both models are run in
    the precision of the arithmetic: weights rounded to 16 bits would need a tolerance that hides real errors. A model
    that float32 rounding changes too much is run again in float64, and then returned so that its tensors are computed
    in float64. Where norms were made even, the rewritten model must compute what the model with even norms does; the
    difference is still that from the original.
    """
    if verification(how) == "none":
        return model, None
    if tell:
        tell(f"verifying {original.name}")
    if verification(how) == "tensors":
        refuse_wrong_table(model)
        refuse_inexact(model)
        return model, None
    even = even_form(model)
    verdict = _compared(original, model, opt, even)
    if not verdict.same and opt.dtype == torch.float32 and torch.device(opt.device).type != "mps":  # mps has no float64
        finer = model.computed_in(torch.float64)
        again = _compared(original, finer, opt, even_form(finer), ROUNDED)
        model, verdict = (finer, again) if again.same else (model, verdict)
    if not verdict.same:
        refuse_beyond([original], opt)
        remedy = "; where rounding explains it, --precision float64 helps" if opt.dtype == torch.float32 else ""
        raise ModelError(
            f"the rewritten '{original.name}' differs from the original by {verdict.max_difference:.3g} "
            f"(relative {verdict.relative_difference:.3g}, allowed {verdict.tolerance:.3g}); nothing was written"
            + remedy
        )
    if even is not None:
        verdict = _compared(original, model, opt)
    return model, verdict.max_difference


def _compared(
    original: Folder,
    model: Rewritten[Alignment],
    opt: Options,
    before: View | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Run both in the dtype of the rewriting, or in the stored dtype if that is finer."""
    stored, arithmetic = original.stored_dtype, model.dtype
    return compare_rewritten(
        original, model, before, workers=opt.workers,
        dtype=arithmetic if stored.itemsize <= arithmetic.itemsize else stored, device=opt.device,
        tolerance=tolerance or tolerance_of(arithmetic),
    )  # fmt: skip


def refuse_wrong_table(model: Model) -> None:
    """Raise ModelError where the maps of a model's table change the function of its tiny twin, see `departure_on_twin`.

    A type that transformers has no class for has no twin, and its table is not checked.
    """
    if not has_class(model.origin):
        return
    found = departure_on_twin(model)
    if not found <= TWIN_TOLERANCE:
        raise ModelError(
            f"the table of family '{model.signature.family}' is wrong for '{model.name}': on a small model of the "
            f"same configuration its maps change the outputs by {found:.3g} (relative); nothing was written"
        )


def refuse_inexact(model: Rewritten[Alignment]) -> None:
    """Raise ModelError where a map of the alignment does not leave the function as it is."""
    try:
        found = departure(model.signature, model.alignment.elements)
    except ValueError as error:
        raise ModelError(f"the rewritten '{model.name}' would not be the same function: {error}") from None
    if found > EXACT:
        raise ModelError(f"the maps found for '{model.name}' are off by {found:.3g} (allowed {EXACT:.3g}); "
                              "nothing was written")  # fmt: skip


def hashed(models: Sequence[Folder]) -> AbstractContextManager[Callable[[], list[dict[str, str]]]]:
    """Compute the hashes of all input files in the background of the block."""
    for model in models:
        assert model.files  # found here rather than in the background thread
    return meanwhile(lambda stop: [hashes(model, stop) for model in models], patient=True)


def write_canonical(
    form: Canonical,
    output: Path,
    overwrite: bool,
    dtype: str | None,
    verify: bool | str,
    placing: Placing,
) -> float | None:
    opt = Options.of({"precision": "float64" if form.dtype == torch.float64 else "float32"})
    moved, difference = verified(form.origin, Rewritten(form, Alignment(), opt.dtype), opt, None, verify)
    folder = model_folder(placing, output, overwrite)
    write_into(Target(folder, output, form, stored_dtype(dtype)), tensors_of(moved, opt, moved.dtype))
    return difference


@dataclass
class Record:
    """The files beside the weights: README.md and onebasin.json. sha256: returns the hashes of the inputs."""

    job: str
    command: str | None
    inputs: Sequence[Folder]
    options: Options
    result: Mapping[str, Any]
    found: Sequence[AlignedPair]
    sha256: Callable[[], Sequence[Mapping[str, str]]] | None = None

    def write(self, folder: Path, card: bool = True) -> None:
        """Write the files. card: whether README.md is one of them."""
        command = self.command or f"onebasin.{self.job}(...)"
        before, after = [item.before for item in self.found], [item.after for item in self.found]
        facts = provenance(
            self.inputs, command=command, options=self.options.to_dict(), result=self.result,
            before=before, after=after, sha256=self.sha256 and self.sha256(),
        )  # fmt: skip
        texts = {"onebasin.json": json.dumps(facts, indent=2) + "\n"}
        if card:
            texts["README.md"] = model_card(
                self.inputs, command=command, result=self.result, before=before, after=after
            )
        with clearly(folder, "its record"):
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")
