# SPDX-License-Identifier: Apache-2.0
"""Writing what a job made: verified first, with a card and a record beside it."""

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
    model_card,
    provenance,
    write_model,
)
from onebasin.models.card import hashes
from onebasin.models.weight_files import clearly
from onebasin.running import Verification, compare_rewritten, tolerance_of
from onebasin.running.classes import class_of, has_class, runnable
from onebasin.running.loading import refuse_contradiction, refuse_lacking
from onebasin.running.trial import TOLERANCE as TWIN_TOLERANCE
from onebasin.running.trial import departure_on_twin
from onebasin.symmetry import Alignment
from onebasin.symmetry.exactness import departure

from .aligning import AlignedPair, refuse_beyond
from .options import Options, Tell, stored_dtype, verification

EXACT = 1e-5  # relative departure of a map from its group that the rounding of float32 explains

# A difference above the tolerance of float32 that float64 leaves this little of is rounding: a wrong map's stays.
ROUNDED = 1e-6


def tensors_of(model: Model, opt: Options, dtype: torch.dtype | None = None) -> LazyTensors:
    """The model, tensor by tensor, computed in `dtype` (default: as the options say). A tensor that nothing moves keeps
    its exact bits."""
    made = LazyTensors.of_model(model, dtype or opt.dtype, opt.device, opt.workers, opt.ray)
    return replace(made, make=partial(_made_whole, model, made.make))


def _made_whole(
    model: Model, make: Callable[[tuple[str, ...]], Mapping[str, Tensor]], roles: tuple[str, ...]
) -> Mapping[str, Tensor]:
    """Make tensors, and raise ModelError where the numbers of one are so small that storing them rounds them by more
    than verification allows.

    The types of 16 bits count as float32: rounding to them is not what a rewriting is held to.
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
            continue  # in another order at most
        raise ModelError(
            f"the rewritten tensor '{model.signature.tensors[role].name}' of '{model.name}' has no number above "
            f"{size:.3g}, of which {str(kind).removeprefix('torch.')} holds few digits; multiply the model first"
        )
    return made


def refuse_unverifiable(checkpoint: Folder, how: bool | str, moves: bool = True) -> None:
    """Raise ModelError, before any work, where a model could not be verified; a type without a table is told first.

    Args:
        checkpoint: The model.
        how: See `verification`; with `none` nothing is refused.
        moves: Whether it will be rewritten, and, with `outputs`, run then. What is not run must still be what its
            config.json says, where there is a class.
    """
    if verification(how) == "none":
        return
    assert checkpoint.signature
    if moves and verification(how) == "outputs":
        runnable(checkpoint)
    elif has_class(checkpoint):
        refuse_contradiction(checkpoint)


def refuse_incomplete(template: Folder) -> None:
    """Raise ModelError where the model that a merge is written like lacks a tensor: no other model can stand in for it,
    and its output would not load. A type that transformers has no class for is taken at its word."""
    if not has_class(template):
        return
    try:
        refuse_lacking(template)
    except ModelError as error:
        raise ModelError(f"{error}; --match none --no-verdict merges what is there") from None


def ready_to_run(models: Sequence[Folder]) -> AbstractContextManager[object]:
    """Import what runs the models while the block runs, which takes about two seconds."""
    return meanwhile(lambda _: [class_of(model) for model in models])


def verified(
    original: Folder,
    model: Rewritten[Alignment],
    opt: Options,
    tell: Tell | None,
    how: bool | str = "outputs",
) -> tuple[Rewritten[Alignment], float | None]:
    """Return a rewritten folder and the largest difference of its outputs; ModelError where that is not rounding.

    how: see `verification`; the difference is None where the models are not run. With `tensors` the maps are checked,
    and the table on a tiny twin. Else both models are run, in the precision of the mathematics: weights rounded to 16
    bits would need a tolerance that hides real errors. A model of which rounding to float32 changes too much is run
    once more in float64, and returned so that its tensors are computed in it.
    """
    if verification(how) == "none":
        return model, None
    if tell:
        tell(f"verifying {original.name}")
    if verification(how) == "tensors":
        refuse_wrong_table(model)
        refuse_inexact(model)
        return model, None
    verdict = _compared(original, model, opt)
    if not verdict.same and opt.dtype == torch.float32 and torch.device(opt.device).type != "mps":  # it has no float64
        finer = model.computed_in(torch.float64)
        again = _compared(original, finer, opt, ROUNDED)
        if again.same:
            return finer, again.max_difference
    if not verdict.same:
        refuse_beyond([original], opt)
        remedy = "; where rounding explains it, --precision float64 helps" if opt.dtype == torch.float32 else ""
        raise ModelError(
            f"the rewritten '{original.name}' differs from the original by {verdict.max_difference:.3g} "
            f"(relative {verdict.relative_difference:.3g}, allowed {verdict.tolerance:.3g}); nothing was written"
            + remedy
        )
    return model, verdict.max_difference


def _compared(
    original: Folder, model: Rewritten[Alignment], opt: Options, tolerance: float | None = None
) -> Verification:
    """Run both in the dtype of the rewriting, or in the stored one where that is finer."""
    stored, arithmetic = original.stored_dtype, model.dtype
    return compare_rewritten(
        original, model, arithmetic=arithmetic, workers=opt.workers,
        dtype=arithmetic if stored.itemsize <= arithmetic.itemsize else stored, device=opt.device,
        tolerance=tolerance or tolerance_of(arithmetic),
    )  # fmt: skip


def refuse_wrong_table(model: Model) -> None:
    """Raise ModelError where the model's table changes the function of its tiny twin, see `departure_on_twin`.

    A type that transformers has no class for has no twin: its table is taken at its word.
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
    """Raise ModelError where a map of its alignment is not one that leaves the function as it is."""
    try:
        found = departure(model.signature, model.alignment.elements)
    except ValueError as error:
        raise ModelError(f"the rewritten '{model.name}' would not be the same function: {error}") from None
    if found > EXACT:
        raise ModelError(f"the maps found for '{model.name}' are off by {found:.3g} (allowed {EXACT:.3g}); "
                              "nothing was written")  # fmt: skip


def hashed(models: Sequence[Folder]) -> AbstractContextManager[Callable[[], list[dict[str, str]]]]:
    """The hashes of all input files, made while the block runs."""
    for model in models:
        assert model.files  # which a thread of its own should not be the first to ask
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
    write_model(
        output,
        tensors_of(moved, opt, moved.dtype),
        form,
        overwrite=overwrite,
        dtype=stored_dtype(dtype),
        placing=placing,
    )
    return difference


@dataclass
class Record:
    """The files beside the weights: README.md and onebasin.json. sha256: gives the hashes of the inputs."""

    job: str
    command: str | None
    inputs: Sequence[Folder]
    options: Options
    result: Mapping[str, Any]
    found: Sequence[AlignedPair]
    sha256: Callable[[], Sequence[Mapping[str, str]]] | None = None

    def write(self, folder: Path, card: bool = True) -> None:
        """card: whether README.md is written, too."""
        command = self.command or f"onebasin.{self.job}(...)"
        before, after = [item.before for item in self.found], [item.after for item in self.found]
        facts = provenance(
            self.inputs, command=command, options=self.options.told(), result=self.result, before=before, after=after,
            sha256=self.sha256 and self.sha256(),
        )  # fmt: skip
        texts = {"onebasin.json": json.dumps(facts, indent=2) + "\n"}
        if card:
            texts["README.md"] = model_card(
                self.inputs, command=command, result=self.result, before=before, after=after
            )
        with clearly(folder, "its record"):
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")
