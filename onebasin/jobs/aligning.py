# SPDX-License-Identifier: Apache-2.0
"""Alignments of opened models: from weights, from activations or learned, for a pair or for many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data.calibration import Data, recut
from onebasin.data.teaching import Forward, attention_of, forward_of, slowed
from onebasin.engine import Store
from onebasin.matching import Matched, Run, Universe, match_universe, match_weights, soft_couplings
from onebasin.matching.activations import match_activations
from onebasin.matching.learned import Learned, Lessons, match_learned
from onebasin.models import (
    Distances,
    Model,
    ModelError,
    Rewritten,
    before_and_after,
    common_roles,
    read_pair,
    shared_roles,
)
from onebasin.models.pairing import corner
from onebasin.models.weight_files import name_of
from onebasin.running import loaded_model, tolerance_of
from onebasin.running.trace import Batch, examples, examples_in
from onebasin.symmetry import Alignment, Group, acting_groups
from onebasin.symmetry.coupling import Softened
from onebasin.symmetry.groups.coupling import Coupling

from .options import Options, Tell

PER_STEP = 1024  # predictions in a step of learning, as nearly as whole examples allow
EXAMPLES = (16, 64)  # fewest and most examples in a step
STARTING = 2048  # examples to find the start of learning on, or up to twice as many: learning needs no better start


@dataclass(frozen=True)
class AlignedPair:
    """A source's alignment to its anchor, and the distances before and after it. couplings: soft maps that follow it
    where permutations were relaxed while learning. losses: of learning, step -> loss on held-out data."""

    alignment: Alignment
    before: Distances
    after: Distances
    objective: list[float]
    notes: list[str]
    couplings: dict[str, Coupling] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Aligned:
    """Every model rewritten by its alignment, and the alignments of all models but the anchor.

    level: of the symmetries that acted; `none` where all models stayed as they are.
    """

    models: list[Rewritten[Alignment]]
    found: list[AlignedPair]
    level: str


def align(source: Model, anchor: Model, opt: Options, tell: Tell | None) -> AlignedPair:
    """Align one model to another."""
    return align_all([anchor, source], 0, opt.symmetry, opt, tell).found[0]


def align_all(
    models: Sequence[Model],
    centre: int,
    level: str,
    opt: Options,
    tell: Tell | None,
    batches: Sequence[Batch] | None = None,
    held_out: Sequence[Batch] | None = None,
) -> Aligned:
    """Align all models to `models[centre]`.

    level: of symmetry, or `none`. batches: calibration data (default: what `opt` asks for, where matching measures).
    held_out: data on which learning chooses its best step (default: a share of `batches`).
    """
    opt.refuse_unknown(models[centre].signature.tensors)
    others = [i for i in range(len(models)) if i != centre]
    shared = {i: shared_roles(models[i], models[centre]) for i in others}
    alignments, objective = [Alignment() for _ in models], list[float]()
    matched: dict[int, Matched] = {}
    learned: Learned | None = None
    if level != "none":
        if batches is None and opt.measures:
            batches, held_out = Data(models, opt, opt, tell, opt.labels).split
        batches = batches or ()
        first = opt.match_with if opt.match_with != "learned" else opt.start
        if first != "none":
            some = batches if opt.match_with != "learned" else spread_over(batches, STARTING)
            with told_beyond(models, opt):
                alignments, objective, matched = starts(models, centre, first, opt, tell, some)
        if opt.match_with == "learned":
            learned = learn(models, centre, alignments, opt, tell, batches, held_out)
    found = []
    for place, i in enumerate(others):
        if learned is not None:
            alignments[i] = learned.alignments[place]
        differing = shared[i].differing if level != "none" else []
        moving = alignments[i] if level != "none" else None
        before, after = before_and_after(models[i], models[centre], moving, opt, opt.weigh)
        if learned is None and i in matched:
            refuse_faint(models[i], before, opt)
            with told_beyond(models, opt):
                refuse_drift(models[i], matched[i], before, after, opt)
            if after.weighted > before.weighted:  # by rounding: the nearest copy is the model itself
                alignments[i], after = Alignment(), before
        found.append(
            AlignedPair(
                alignments[i],
                before,
                after,
                objective,
                [f"heads of different tasks, not matched: {', '.join(differing)}"] if differing else [],
                learned.couplings[place] if learned is not None else {},
                learned.losses if learned is not None else {},
            )
        )
    moved = [Rewritten(*pair, opt.dtype) for pair in zip(models, alignments, strict=True)]
    return Aligned(moved, found, level if any(one.elements for one in alignments) else "none")


def starts(
    models: Sequence[Model],
    centre: int,
    match_with: str,
    opt: Options,
    tell: Tell | None,
    batches: Sequence[Batch],
) -> tuple[list[Alignment], list[float], dict[int, Matched]]:
    """Return every model's alignment to `models[centre]` by weights or activations, the objective after every sweep,
    and the reports of weight matching on the models that it matched to the centre alone.

    By weights, and at levels beyond `paper`, three or more models are all matched to one another.
    """
    others = [i for i in range(len(models)) if i != centre]
    found = [Alignment() for _ in models]
    if match_with == "weights" and len(models) > 2 and opt.symmetry != "paper":
        universe = align_together(models, centre, opt, tell)
        return universe.alignments, universe.objective, {}
    matched: dict[int, Matched] = {}
    eager: dict[str, Any] = {"dtype": opt.dtype, "device": opt.device, "attention": "eager"}
    for i in others:
        if match_with == "weights":
            roles = shared_roles(models[i], models[centre]).roles
            matched[i] = align_weights(models[i], models[centre], roles, opt, tell)
            found[i] = matched[i].alignment
        else:
            pair = [loaded_model(model, **eager) for model in (models[centre], models[i])]
            groups = groups_of(models[i], opt)
            measured = match_activations(models[i].signature, pair[0], pair[1], batches, groups, tell=tell)
            found[i] = with_rest(measured, models[i], models[centre], groups, opt, tell)
    return found, next((one.objective for one in matched.values()), []), matched


def align_weights(
    source: Model,
    anchor: Model,
    roles: Sequence[str],
    opt: Options,
    tell: Tell | None,
    groups: Mapping[str, Group] | None = None,
) -> Matched:
    """Match the weights of `source` to those of `anchor`, over the tensors `roles` (groups: see `match_weights`)."""

    def read(role: str) -> tuple[Tensor, Tensor]:
        return read_pair(anchor, source, role, opt.dtype, opt.device)

    def progress(what: str, objective: float) -> None:
        if tell:
            tell(f"matching {source.name}: {what}, distance {objective**0.5:.6g}")

    store = None if opt.units is None else Store(Path(opt.units), inputs(source, anchor, roles, opt))
    run = Run(opt.workers, opt.ray, tell and progress, store)
    return match_weights(source.signature, read, groups or groups_of(source, opt), opt, roles=roles, run=run)


def with_rest(
    measured: Alignment, source: Model, anchor: Model, groups: Mapping[str, Group], opt: Options, tell: Tell | None
) -> Alignment:
    """Return an alignment by activations, followed by one by weights of the spaces that it did not measure: the neurons
    of experts, which run on other tokens in every model."""
    rest = {root: group.rigid() for root, group in groups.items() if root not in measured.elements}
    if not rest:
        return measured
    roles, moved = shared_roles(source, anchor).roles, Rewritten(source, measured, opt.dtype)
    one_run = replace(opt, units=None)  # what is kept there is of the whole match
    return align_weights(moved, anchor, roles, one_run, tell, rest).alignment.after(measured)


def inputs(source: Model, anchor: Model, roles: Sequence[str], opt: Options) -> str:
    """Return, as text, all that a match depends on: the present files of both models, what views changed in them (the
    same files with even norms are other models), the tensors and the options."""
    files = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for model in (source, anchor)
        for path in sorted({model.origin.folder / "config.json", *model.origin.files.values()})
    ]
    settings = {key: str(value) for key, value in opt.to_dict().items()}
    return json.dumps([torch.__version__, files, source.notes, anchor.notes, list(roles), settings])


def groups_of(model: Model, opt: Options) -> dict[str, Group]:
    return acting_groups(model.signature, opt.symmetry, rescale=opt.rescale, parts=opt.parts, layers=opt.layers)


def spread_over(batches: Sequence[Batch], examples: int) -> Sequence[Batch]:
    """Return every n-th batch, so that at least this many examples are left (or all) and fewer than twice as many."""
    return batches[:: max(1, sum(map(examples_in, batches)) // examples)]


@contextmanager
def told_beyond(models: Sequence[Model], opt: Options) -> Iterator[None]:
    """If matching fails, name a tensor whose squares overflow or underflow. Moments are sums of such squares.

    A map that scales a tiny tensor up to its anchor's size is so large that its own square overflows.
    """
    try:
        yield
    except (RuntimeError, ValueError):  # torch raises the former for linear algebra
        refuse_beyond(models, opt)
        raise


def refuse_beyond(models: Sequence[Model], opt: Options) -> None:
    """Raise ModelError for a tensor whose square, or product with another such tensor, overflows or underflows."""
    most, least = torch.finfo(opt.dtype).max ** 0.5, least_of(opt.dtype) ** 0.5
    norms = {
        (model, role): float(torch.linalg.vector_norm(model.read(role, opt.dtype, opt.device), dtype=torch.float64))
        for model in models
        for role, entry in model.signature.tensors.items()
        if entry.alias is None
    }
    large = [key for key, norm in norms.items() if norm > 1e-3 * most]  # there are sums of squares, and products
    small = [key for key, norm in norms.items() if 0 < norm < least]
    for model, role in (large + small)[:1]:
        size = f"a norm of {norms[model, role]:.3g}, too {'large' if large else 'small'} to be squared"
        other = "; use --precision float64" if opt.dtype == torch.float32 else ""
        raise ModelError(
            f"the tensor '{model.signature.tensors[role].name}' of '{model.name}' has {size} in "
            f"{name_of(opt.dtype)}{other}"
        ) from None


def refuse_faint(source: Model, before: Distances, opt: Options) -> None:
    """Raise ModelError where all weights are so small that their squares, or the rewritten weights, lose digits.

    Below the smallest normal number of a dtype, precision falls with the size of a number.
    """
    size = (before.weighted + before.weighted_norm) ** 0.5
    stored = source.origin.stored_dtype
    if 0 < size < least_of(stored):
        raise ModelError(
            f"the weights of '{source.name}' and its anchor, of norm {size:.3g}, are too small to be rewritten in "
            f"{name_of(stored)}, where they lose digits; scale both models up first"
        )
    if 0 < size < least_of(opt.dtype) ** 0.5:
        raise ModelError(
            f"the weights of '{source.name}' and its anchor, of norm {size:.3g}, are too small to be squared in "
            f"{name_of(opt.dtype)}; use --precision float64"
        )


def least_of(dtype: torch.dtype) -> float:
    """Return the least number whose rounding error is itself a normal number."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def refuse_drift(source: Model, matched: Matched, before: Distances, after: Distances, opt: Options) -> None:
    """Raise ModelError where a rewritten model is farther from the anchor than matching says, beyond rounding.

    The distance is measured on the tensors as they will be written; the objective comes from moments and products of
    maps.
    """
    promised = before.weighted - (matched.before - matched.objective[-1])
    if not abs(after.weighted - promised) <= tolerance_of(opt.dtype) * (before.weighted + before.weighted_norm):
        raise ModelError(
            f"the rewritten '{source.name}' would lie at a squared distance of {after.weighted:.6g} from the anchor, "
            f"not at the {promised:.6g} that matching found, so its maps are wrong; nothing was written"
        )


def learn(
    models: Sequence[Model],
    centre: int,
    alignments: Sequence[Alignment],
    opt: Options,
    tell: Tell | None,
    batches: Sequence[Batch],
    held_out: Sequence[Batch] | None = None,
) -> Learned:
    """Learn the alignments of all models to `models[centre]` together, in the order of the others."""
    others = [i for i in range(len(models)) if i != centre]
    how: dict[str, Any] = {"dtype": opt.dtype, "device": opt.device, "attention": attention_of(opt.mixed, opt.device)}
    stock = [loaded_model(models[i], **how) for i in (centre, *others)]
    forward = forward_of(stock[0], opt.mixed)
    tensors = cornered([one.tensors for one in stock])
    shown: Callable[[str, float], None] | None = None
    if tell:
        hint = slowed(opt.mixed, opt.device)

        def shown(what: str, loss: float) -> None:
            tell(f"learning: {what}, loss {loss:.4g}{hint}")

    steps = recut(batches, examples_per_step(forward, stock[0].parameter, batches))
    return match_learned(
        models[centre].signature, tensors, [alignments[i] for i in others], groups_of(models[centre], opt),
        Lessons(forward, steps, held_out), opt, shown,
    )  # fmt: skip


def cornered(models: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return every model's tensors, cut to the rows that all models have (position tables may differ in length)."""
    found: list[dict[str, Tensor]] = [dict(model) for model in models]
    for role in set.intersection(*(set(model) for model in models)):
        shapes = [model[role].shape for model in models]
        if len(set(shapes)) > 1 and len({len(shape) for shape in shapes}) == 1:
            rows = min(shape[0] for shape in shapes)
            for mine, model in zip(found, models, strict=True):
                mine[role] = model[role][:rows]
    return found


def examples_per_step(forward: Forward, tensors: Mapping[str, Tensor], batches: Sequence[Batch]) -> int:
    """Return how many examples make a step of about `PER_STEP` predictions (an image has one, a sequence many), at most
    an eighth of all."""
    with torch.no_grad():
        outputs = forward(tensors, examples(batches[0], 0, 1))
    predictions = max(value.numel() // value.shape[-1] for value in outputs.values() if value.dim())
    count = sum(map(examples_in, batches))
    return min(max(PER_STEP // predictions, EXAMPLES[0]), EXAMPLES[1], max(count // 8, 1))


def align_together(models: Sequence[Model], centre: int, opt: Options, tell: Tell | None) -> Universe:
    """Match three or more models to one another by their weights, over the rows that all of them have."""

    def read(model: Model, role: str) -> Tensor:
        return model.read(role, opt.dtype, opt.device)[corner(each.signature.tensors[role].shape for each in models)]

    def progress(what: str, objective: float) -> None:
        if tell:
            tell(f"matching {len(models)} models: {what}, {objective**0.5:.6g}")

    return match_universe(
        [model.signature for model in models],
        [partial(read, model) for model in models],
        [groups_of(model, opt) for model in models],
        opt,
        roles=common_roles(models).roles,
        centre=centre,
        run=Run(opt.workers, progress=tell and progress),
    )


def softened(source: Rewritten[Alignment], anchor: Model, temperature: float, opt: Options) -> Softened:
    def read(role: str) -> tuple[Tensor, Tensor]:
        return read_pair(anchor, source, role, opt.dtype, opt.device)

    return Softened(source.alignment, soft_couplings(source.signature, read, groups_of(source, opt), temperature))
