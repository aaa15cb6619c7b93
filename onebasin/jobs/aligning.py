# SPDX-License-Identifier: Apache-2.0
"""From opened models to alignments: on weights, on activations, learned, for a pair or for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onebasin.checkpoint import Checkpoint, Distances, distances, read_pair, shared_roles, stock_model
from onebasin.data.calibration import from_file, recut, self_generated
from onebasin.data.teaching import forward_of
from onebasin.matching import Matched, match_universe, match_weights, soft_couplings
from onebasin.matching.activations import match_activations
from onebasin.matching.learned import match_learned
from onebasin.symmetry import Alignment, Group, acting_groups
from onebasin.symmetry.coupling import Softened

from .folders import common_roles
from .options import Options, Tell

LEARNING_BATCH = 16


@dataclass(frozen=True)
class Found:
    """A source's alignment to its anchor, and the distances before and after it."""

    alignment: Alignment
    before: Distances
    after: Distances
    objective: list[float]
    notes: list[str]


def align(source: Checkpoint, anchor: Checkpoint, opt: Options, tell: Tell | None, identity: bool = False) -> Found:
    shared = shared_roles(source, anchor)
    before = distances(source, anchor, dtype=opt.dtype)
    notes = [f"heads of different tasks, not matched: {', '.join(shared.differing)}"] if shared.differing else []
    if identity:
        return Found(Alignment(), before, before, [], [])
    if opt.measures:
        alignment = align_on_data(source, anchor, shared.roles, opt, tell)
        return Found(alignment, before, distances(source, anchor, alignment, dtype=opt.dtype), [], notes)
    matched = align_weights(source, anchor, shared.roles, opt, tell)
    after = distances(source, anchor, matched.alignment, dtype=opt.dtype)
    return Found(matched.alignment, before, after, matched.objective, notes)


def align_on_data(
    source: Checkpoint, anchor: Checkpoint, roles: Sequence[str], opt: Options, tell: Tell | None
) -> Alignment:
    groups, batches = groups_of(source, opt), calibration([anchor, source], opt, tell)
    how: dict[str, Any] = {"dtype": opt.dtype, "device": opt.device}
    if opt.match_with == "activations" or opt.start == "activations":
        eager = [stock_model(model, **how, attention="eager") for model in (anchor, source)]
        alignment = match_activations(source.signature, eager[0], eager[1], batches, groups, tell=tell)
    else:
        alignment = align_weights(source, anchor, roles, opt, tell).alignment
    if opt.match_with == "activations":
        return alignment
    fixed, moving = stock_model(anchor, **how), stock_model(source, **how)
    steps = recut(batches, LEARNING_BATCH)
    learned = match_learned(
        source.signature, fixed.parameter, [moving.parameter], [alignment], groups, forward_of(fixed), steps,
        steps=opt.steps, seed=opt.seed, progress=tell and (lambda what, loss: tell(f"{what}, loss {loss:.4g}")),
    )  # fmt: skip
    return learned.alignments[0]


def align_weights(
    source: Checkpoint, anchor: Checkpoint, roles: Sequence[str], opt: Options, tell: Tell | None
) -> Matched:
    return match_weights(
        source.signature,
        lambda role: read_pair(anchor, source, role, opt.dtype, opt.device),
        groups_of(source, opt),
        roles=roles,
        **opt.descent,
        progress=tell
        and (lambda what, objective: tell(f"matching {source.given}: {what}, distance {objective**0.5:.6g}")),
    )


def align_all(
    models: Sequence[Checkpoint], centre: int, level: str, opt: Options, tell: Tell | None
) -> tuple[list[Found], list[Alignment]]:
    """Align all models to `models[centre]`: what was found for the others, and every model's alignment.

    At level `paper` each is matched to the anchor alone. At the other levels three or more models are matched to one
    another, in the anchor's frame.
    """
    others = [i for i in range(len(models)) if i != centre]
    if level in ("none", "paper") or len(models) == 2 or opt.measures:
        found = [align(models[i], models[centre], opt, tell, identity=level == "none") for i in others]
        alignments = [item.alignment for item in found]
        alignments.insert(centre, Alignment())
        return found, alignments
    roles = common_roles(models).roles
    tensors: list[dict[str, Tensor]] = [{} for _ in models]
    for role in roles:
        read = [model.read(role, opt.dtype, opt.device) for model in models]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in read), strict=True))
        for mine, tensor in zip(tensors, read, strict=True):
            mine[role] = tensor[corner]
    universe = match_universe(
        [model.signature for model in models],
        tensors,
        [groups_of(model, opt) for model in models],
        centre=centre,
        **opt.descent,
        progress=tell
        and (lambda what, objective: tell(f"matching {len(models)} models: {what}, {objective**0.5:.6g}")),
    )
    found = []
    for i in others:
        before = distances(models[i], models[centre], dtype=opt.dtype)
        after = distances(models[i], models[centre], universe.alignments[i], dtype=opt.dtype)
        found.append(Found(universe.alignments[i], before, after, universe.objective, []))
    return found, universe.alignments


def calibration(models: Sequence[Checkpoint], opt: Options, tell: Tell | None) -> list[dict[str, Tensor]]:
    """Inputs to measure on: what the models write themselves, or a file. ValueError where neither is given."""
    if opt.data is None:
        raise ValueError("calibration data are missing: --data self for causal language models, else --data FILE")
    if tell:
        tell("gathering calibration data")
    if opt.data == "self":
        writers = [stock_model(model, device=opt.device).model for model in models]
        return self_generated(writers, opt.samples, opt.context, opt.seed)
    options: dict[str, Any] = {"context": opt.context, "vocabulary": opt.vocabulary}
    given = {key: value for key, value in options.items() if value is not None}
    return from_file(opt.data, models[0].folder, opt.task or task_of(models[0]), opt.samples, **given)


def task_of(model: Checkpoint) -> str:
    """The task that a model's class is for. Raises ValueError where it has no head."""
    names = " ".join(model.config.get("architectures") or [])
    for ending, task in (
        ("MaskedLM", "masked-lm"),
        ("LM", "causal-lm"),
        ("ImageClassification", "image-classification"),
        ("SequenceClassification", "text-classification"),
        ("TokenClassification", "token-classification"),
    ):
        if ending in names:
            return task
    raise ValueError(f"'{model.given}': its class does not name the task of the calibration data; say --task")


def groups_of(model: Checkpoint, opt: Options) -> dict[str, Group]:
    return acting_groups(model.signature, opt.symmetry, rescale=opt.rescale, parts=opt.parts, layers=opt.layers)


def softened(
    source: Checkpoint, anchor: Checkpoint, alignment: Alignment, temperature: float, opt: Options
) -> Softened:
    def read(role: str) -> tuple[Tensor, Tensor]:
        fixed, moving = read_pair(anchor, source, role, opt.dtype, opt.device)
        return fixed, alignment.apply(source.signature, role, moving)

    return Softened(alignment, soft_couplings(source.signature, read, groups_of(source, opt), temperature))
