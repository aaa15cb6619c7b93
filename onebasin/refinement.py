# SPDX-License-Identifier: Apache-2.0
"""The job behind `onebasin refine`: distil a merged folder from the folders that it was merged from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.api import Model, Tell, _checkpoints, _on_device, _refuse_existing, _stored, _workplace
from onebasin.checkpoint import Checkpoint, load_model, provenance, write_model
from onebasin.checkpoint.stock import stock_model
from onebasin.checkpoint.trace import Batch
from onebasin.fusion.refine import Refined
from onebasin.fusion.refine import refine as distil

NOTE = "distillation: these weights were trained after merging, on what the teachers predict"


def refine(
    merged: Model,
    teachers: Sequence[Model],
    output: str | Path | None = None,
    *,
    data: str = "self",
    task: str = "causal-lm",
    count: int = 512,
    length: int | None = None,
    batch: int = 16,
    steps: int = 200,
    lr: float = 1e-3,
    weights: Sequence[float] | None = None,
    control: Model | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    family: str | None = None,
    overwrite: bool = False,
    tell: Tell | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Distil `teachers` into `merged`; see `onebasin.fusion.refine`.

    output: folder to write (None: the result holds the `model`). data: "self" lets causal language models write the
    calibration data themselves; else an unlabelled file or builtin set, read as `task` says. count: examples. length:
    tokens of the sequences that models write (default: what they take, at most 512). batch: examples in a step.
    control: another start, such as the plain average of models that were not matched; it gets the same steps on the
    same data, is not written, and its losses are reported beside.

    Returns {"output", "steps", "step", "loss_before", "loss_after", "control", "notes", "seconds"}; losses are those on
    data held back, in nats of KL divergence from the teachers' mixture. Raises ValueError with one clear sentence.
    """
    started = time.perf_counter()
    _on_device(device)
    stored = _stored(dtype)
    extra = [] if control is None else [control]
    with _checkpoints([merged, *extra, *teachers], family) as given, _workplace(output) as target:
        _refuse_existing(target, given, overwrite)
        first, masters = given[: 1 + len(extra)], given[1 + len(extra) :]
        batches = _calibration(data, task, given[0], masters, count, length, batch, seed, device, tell)

        def run(start: Checkpoint, what: str) -> Refined:
            return distil(start, masters, batches, steps=steps, lr=lr, weights=weights, seed=seed, device=device,
                          progress=_progress(tell, what))  # fmt: skip

        compared = [_summary(run(start, f"control {start.given}")) for start in first[1:]]
        found = run(first[0], first[0].given)
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "steps": steps,
            **_summary(found),
            "control": {"model": first[1].given, **compared[0]} if compared else None,
            "notes": [NOTE],
        }

        def complete(folder: Path) -> None:
            options = {"data": data, "task": task, "count": count, "length": length, "batch": batch, "lr": lr,
                       "weights": weights, "seed": seed}  # fmt: skip
            facts = provenance(given, command=command or "onebasin.refine(...)", options=options, result=result)
            (folder / "onebasin.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
            (folder / "README.md").write_text(_card(target.name, given[0], masters, result, command), "utf-8")

        write_model(target, _tensors(given[0], found), given[0], overwrite=overwrite, dtype=stored, check=complete,
                    inputs=[model.folder for model in given])  # fmt: skip
        if output is None:
            result["model"] = load_model(target)
    result["seconds"] = round(time.perf_counter() - started, 3)
    return result


def _calibration(
    data: str,
    task: str,
    merged: Checkpoint,
    teachers: Sequence[Checkpoint],
    count: int,
    length: int | None,
    batch: int,
    seed: int,
    device: str,
    tell: Tell | None,
) -> list[Batch]:
    from onebasin.data.calibration import from_file, self_generated

    if data != "self":
        return list(from_file(data, merged.folder, task, count, batch=batch))
    if tell:
        tell("the teachers write calibration data")
    models = [stock_model(teacher, device=device).model for teacher in teachers]
    return list(self_generated(models, count, length, seed, batch))


def _progress(tell: Tell | None, what: str) -> Callable[[str, float], None] | None:
    return tell and (lambda text, loss: tell(f"{what}: {text}, loss {loss:.4g}"))


def _summary(found: Refined) -> dict[str, Any]:
    return {"step": found.step, "loss_before": found.losses[0], "loss_after": found.losses[found.step]}


def _tensors(like: Checkpoint, found: Refined) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the folder stores, under its names."""
    for role, entry in like.signature.tensors.items():
        if entry.stored:
            yield from entry.split(found.tensors[role if role in found.tensors else str(entry.alias)])


def _card(
    name: str, merged: Checkpoint, teachers: Sequence[Checkpoint], result: dict[str, Any], command: str | None
) -> str:
    models = [merged.given, *(teacher.given for teacher in teachers)]
    lines = ["---", "library_name: transformers", "base_model:", *(f"- {json.dumps(model)}" for model in models)]
    lines += ["tags:", "- onebasin", "- distillation", "---", "", f"# {name}", ""]
    lines += [f"`{merged.given}` after {result['step']} steps of distillation. This is training, not alignment: the "
              "teachers are", "", *(f"- `{teacher.given}`" for teacher in teachers), ""]  # fmt: skip
    lines += ["| KL divergence from the teachers, on data held back | before | after |", "|---|---:|---:|"]
    rows = [(merged.given, result), *((c["model"], c) for c in [result["control"]] if c)]
    lines += [f"| {model} | {row['loss_before']:.6g} | {row['loss_after']:.6g} |" for model, row in rows]
    lines += ["", "Made with onebasin:", "", "```sh", command or "onebasin.refine(...)", "```", ""]
    return "\n".join(lines)
