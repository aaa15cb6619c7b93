# SPDX-License-Identifier: Apache-2.0
"""onebasin refine: distil a merged model from the models that it was merged from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onebasin.data.calibration import Data, recut
from onebasin.data.teaching import slowed
from onebasin.fusion.refine import Refined, Refining
from onebasin.fusion.refine import refine as distil
from onebasin.models import Folder, Target, provenance, write_into
from onebasin.models.card import front_matter, paths_of
from onebasin.models.outputs import Output, model_folder
from onebasin.models.published import block, code, prose, public_name, without_paths
from onebasin.settings import refuses_unknown, take

from .folders import opened, refuse_places, together, workplace
from .options import ModelSource, Options, Tell, stored_dtype
from .results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import RefineKeywords

NOTE = "distillation: these weights were trained after merging, on what the teachers predict"
ALONE = "no control: only as many steps from another start, such as the plain average, show what this start is worth"
CALL = "onebasin.refine(...)"
DATA = {"data": "self", "samples": 2048}  # by default


@refuses_unknown(Options, Refining)
def refine(
    merged: ModelSource,
    teachers: Sequence[ModelSource],
    output: str | Path | None = None,
    *,
    control: ModelSource | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    tell: Tell | None = None,
    command: str | None = None,
    **options: Unpack[RefineKeywords],
) -> Result:
    """Distil `teachers` into `merged`; see `onebasin.fusion.refine`.

    Args:
        merged: the model that learns.
        teachers: the models that it was made of.
        output: the folder to write (None: the result holds the `model`).
        control: another start, such as the plain average of unmatched models. It gets the same steps on the same data
            and its losses are reported too, but it is not written.
        dtype: of the weights written (default: those of `merged`).
        overwrite: whether to replace the output where it exists.
        tell: called with a sentence at every step.
        command: the command that the model card names.
        options: the fields of `Refining`, and of `Options` (calibration data, device, family). The run of the control
            is saved beside the checkpoint, with the ending `.control`.

    Returns:
        `output`, `steps`, `step`, `loss_before`, `loss_after`, `control`, `notes` and `seconds`; losses are KL
        divergences from the mixture of the teachers in nats, on held-out data.

    Raises:
        ValueError: for models, data or settings that do not fit.
    """
    started = time.perf_counter()
    given_options: dict[str, Any] = {**DATA, **options}
    rest = dict(given_options)
    how, stored = take(Refining, rest), stored_dtype(dtype)
    opt = Options.of({**rest, "seed": how.seed, "checkpoint": how.checkpoint})
    extra = [] if control is None else [control]
    how.shares(len(teachers))
    with opened([merged, *extra, *teachers], opt.family) as given, workplace(output) as target:
        beside = opt.checkpoint and f"{opt.checkpoint}.control"
        outputs = [Output("the output", target if output is None else output)]
        outputs += [Output("the control's checkpoint", beside, "", grows=True)] if beside and extra else []
        refuse_places(outputs, given, overwrite, opt)
        starts, masters = given[: 1 + len(extra)], given[1 + len(extra) :]
        batches = recut(Data(masters, opt, opt, tell, opt.labels).batches, how.batch)

        hint = slowed(how.mixed, opt.device) if tell else ""

        def run(start: Folder, saved: str | None) -> Refined:
            said = _progress(tell, start.name, hint)
            return distil(start, masters, batches, replace(how, checkpoint=saved), opt, progress=said)

        compared = [{"model": start.name, **_summary(run(start, beside))} for start in starts[1:]]
        found = run(starts[0], opt.checkpoint)
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "steps": how.steps,
            **_summary(found),
            "control": compared[0] if compared else None,
            "notes": [NOTE] if compared else [NOTE, ALONE],
        }

        with together(opt) as placing:
            folder = model_folder(placing, target, overwrite)
            write_into(Target(folder, target, starts[0], stored), rewritten(starts[0], found))
            facts = provenance(given, command=command or CALL, options=given_options, result=result)
            (folder / "onebasin.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
            (folder / "README.md").write_text(_card(target.name, starts[0], masters, result, command), "utf-8")
        made = Result(result)
        if output is None:
            made.hold(target)
    made["seconds"] = round(time.perf_counter() - started, 3)
    return made


def _progress(tell: Tell | None, what: str, hint: str) -> Callable[[str, float], None] | None:
    return tell and (lambda text, loss: tell(f"distilling {what}: {text}, loss {loss:.4g}{hint}"))


def _summary(found: Refined) -> dict[str, Any]:
    return {"step": found.step, "loss_before": found.losses[0], "loss_after": found.losses[found.step]}


def rewritten(like: Folder, found: Refined) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that the folder stores, under its names on disk."""
    for role, entry in like.signature.tensors.items():
        if entry.stored:
            yield from entry.split(found.tensors[role])


def _card(name: str, merged: Folder, teachers: Sequence[Folder], result: dict[str, Any], command: str | None) -> str:
    models = [merged, *teachers]
    names = [public_name(model.name) for model in models]
    lines = [*front_matter(names, ["onebasin", "distillation"]), f"# {prose(name)}", ""]
    lines += [f"{code(names[0])} after {result['step']} steps of distillation. This is training, not alignment: the "
              "teachers are", "", *(f"- {code(teacher)}" for teacher in names[1:]), ""]  # fmt: skip
    lines += ["| KL divergence from the teachers, on data held out | before | after |", "|---|---:|---:|"]
    rows = [(names[0], result), *((public_name(c["model"]), c) for c in [result["control"]] if c)]
    lines += [f"| {prose(model)} | {row['loss_before']:.6g} | {row['loss_after']:.6g} |" for model, row in rows]
    lines += ["", "Made with onebasin:", "", *block(without_paths(command or CALL, paths_of(models)), "sh"), ""]
    return "\n".join(lines)
