# SPDX-License-Identifier: Apache-2.0
"""onebasin match: rewrite one model as its functionally identical copy closest to another."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onebasin.engine import peak_memory
from onebasin.models import Canonical, Folder, Rewritten, Target, Widened, write_into
from onebasin.models.outputs import Output, model_folder
from onebasin.models.weight_files import clearly
from onebasin.running import pretrained
from onebasin.running.lora import CONFIG as ADAPTER
from onebasin.running.lora import Adapter, fit, folded, rewritten_adapter, write_adapter
from onebasin.settings import refuses_unknown
from onebasin.symmetry import Signature

from .aligning import align
from .apply import ModelAlignment
from .folders import beside, gauge, opened, refuse_places, together, unit_folder, widened, workplace
from .options import (
    LEVEL_NAMES,
    STREAM_LEVELS,
    ModelSource,
    Options,
    Tell,
    level_named,
    refuse_even,
    stored_dtype,
    verification,
)
from .results import MatchResult
from .writing import Record, hashed, ready_to_run, refuse_unverifiable, tensors_of, verified, write_canonical

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import MatchKeywords


@refuses_unknown(Options, more=lambda: LEVEL_NAMES)
def match(
    source: ModelSource,
    anchor: ModelSource,
    output: str | Path | None = None,
    *,
    alignment: str | Path | None = None,
    anchor_output: str | Path | None = None,
    adapter: str | Path | None = None,
    adapter_output: str | Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | str = "outputs",
    tell: Tell | None = None,
    command: str | None = None,
    **options: Unpack[MatchKeywords],
) -> MatchResult:
    """Rewrite `source` as the functionally identical model that lies closest to `anchor`.

    Args:
        source: the model to rewrite.
        anchor: the model to come close to.
        output: the folder to write. None writes nothing: the result holds the `model` and, where the level rotates the
            residual stream, the anchor's canonical form as `anchor_model`.
        alignment: the file to save the alignment in.
        anchor_output: where levels that rotate the residual stream write the anchor's canonical form, to which the
            output is close (default: output + "-anchor").
        adapter: the folder of a LoRA adapter of the source, to be rewritten with it.
        adapter_output: where the rewritten adapter is written (default: output + "-adapter").
        dtype: of the weights written (default: the source's).
        overwrite: whether to replace the output where it exists.
        verify: before anything is moved into place, `outputs` compares the outputs on random inputs; `tensors` checks
            the maps of all tensors, and the table on a tiny model of the same configuration; `none` checks nothing.
        tell: called with a sentence at every step.
        command: the command that the model card names.
        options: the fields of `Options`; the level is `match`, `symmetry` or `level`.

    Returns:
        The `model`, its `alignment`, `distance_before` and `distance_after`; also a dictionary of all facts, as
        `--json` prints them.

    Raises:
        ValueError: (ModelError, TableError) for models that cannot be matched, and for an output that would differ from
            the source beyond rounding. Nothing is written then.
    """
    started = time.perf_counter()
    left: dict[str, Any] = {**options}
    level_named(left, "symmetry")
    opt, stored = Options.of(left), stored_dtype(dtype)
    refuse_even(opt, opt.symmetry)
    if opt.permutations == "sinkhorn":
        raise ValueError("permutations 'sinkhorn': a relaxed model is not the same function; use it in a merge")
    with ExitStack() as stack:
        given = stack.enter_context(opened([source, anchor], opt.family))
        target = stack.enter_context(workplace(output))
        streams = opt.symmetry in STREAM_LEVELS
        anchored = beside(target if output is None else output, anchor_output, "anchor")
        if adapter is not None and output is None:
            raise ValueError("an adapter is written beside a model: name an output")
        followed = None if adapter is None or output is None else beside(output, adapter_output, "adapter")
        replaces = refuse_places(
            [
                Output("the output", target if output is None else output),
                *([Output("the anchor's output", anchored)] if streams else []),
                *([] if alignment is None else [Output("the alignment", alignment, "")]),
                *([] if followed is None else [Output("the adapter's output", followed, ADAPTER)]),
            ],
            [*given, *([] if adapter is None else [Path(adapter)])],
            overwrite,
            opt,
        )
        opt = stack.enter_context(unit_folder(output, opt))
        sha256 = stack.enter_context(hashed(given))
        if adapter is not None and opt.even:
            raise ValueError("an adapter cannot follow a model whose norms were made even: leave out --even")
        lora = None if adapter is None else Lora.of(adapter, given[0], opt)
        refuse_unverifiable(given[0], verify)
        first, second = (gauge(checkpoint, opt, tell) for checkpoint in given)
        first = widened(first, second)
        if lora is not None and isinstance(first, Widened):
            raise ValueError(f"'{first.name}' is widened to the anchor's sizes, which its adapter cannot follow")
        stack.enter_context(ready_to_run(given[:1] if verification(verify) == "outputs" else []))
        found = align(first, second, opt, tell)
        moved, difference = verified(given[0], Rewritten(first, found.alignment, opt.dtype), opt, tell, verify)
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": second.name,
            "symmetry": opt.symmetry,
            "rescale": opt.rescale,
            "distance_before": found.before.distance,
            "distance_after": found.after.distance,
            "objective": found.objective,
            "max_output_difference": difference,
        }
        result["notes"] = list(dict.fromkeys([*first.notes, *found.notes]))
        if moved.dtype != opt.dtype:
            result["notes"].append(f"computed in float64: rounding to float32 changes the outputs of '{first.name}'")
        record = Record("match", command, given, opt, result, [found], sha256)

        refuse_unverifiable(given[1], verify, moves=streams)  # now that its class is imported
        if tell:
            tell("writing")
        with together(opt) as placing:
            folder = model_folder(placing, target, replaces(target))
            write_into(Target(folder, target, moved, stored), tensors_of(moved, opt, moved.dtype))
            record.write(folder)
            if alignment is not None:
                with clearly(Path(alignment), "the alignment"):
                    found.alignment.save(placing.file(Path(alignment), replaces(alignment)))
                result["alignment"] = str(alignment)
            if isinstance(second, Canonical):
                write_canonical(second, Path(anchored), replaces(anchored), dtype, verify, placing)
            if lora is not None and followed is not None:
                tensors = rewritten_adapter(lora.adapter, lora.fitted, found.alignment, opt.dtype, lora.tensors)
                place = placing.folder(Path(followed), ADAPTER if replaces(followed) else None)
                write_adapter(lora.adapter, tensors, place, output or "")
                result["adapter_output"] = str(followed)
        if isinstance(second, Canonical) and (output is not None or anchor_output):
            result["anchor_output"] = str(anchored)
        made = MatchResult(result, ModelAlignment.of(found.alignment, source, first, opt.family, opt.dtype))
        if output is None:
            made.hold(target)
            if isinstance(second, Canonical):
                made["anchor_model"] = pretrained(anchored)
    made["seconds"], made["peak_memory"] = round(time.perf_counter() - started, 3), peak_memory()
    return made


@dataclass(frozen=True)
class Lora:
    """An adapter of the source, its signature, and its tensors where the source is in canonical form."""

    adapter: Adapter
    fitted: Signature
    tensors: dict[str, Tensor] | None

    @classmethod
    def of(cls, folder: str | Path, base: Folder, opt: Options) -> Lora:
        """Read an adapter. Raises ValueError, before any work, where it cannot be rewritten with its model."""
        adapter = Adapter(folder)
        fitted = fit(adapter, base)
        moved = folded(adapter, fitted, base, opt.dtype) if opt.symmetry in STREAM_LEVELS else None
        return cls(adapter, fitted, moved)
