# SPDX-License-Identifier: Apache-2.0
"""The main jobs, from model folders to model folders: check, match, merge, verify, distance, canonical.

Each function is what the command of the same name runs. Models are folders, hub ids or `PreTrainedModel` objects;
objects are written to a temporary folder first, because a folder's tensor names are the contract.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from onebasin.checkpoint import (
    DTYPES,
    Canonical,
    Checkpoint,
    CheckpointError,
    Distances,
    Verification,
    Widened,
    compare,
    distances,
    load_model,
    model_card,
    provenance,
    read_pair,
    shared_roles,
    stock_model,
    tolerance_of,
    write_model,
)
from onebasin.checkpoint.adapter import Adapter, fit, folded, refuse_adapter, transported, write_adapter
from onebasin.checkpoint.preflight import ancestors, preflight, vocabulary
from onebasin.checkpoint.preflight import peek as peeked
from onebasin.checkpoint.reader import one_line
from onebasin.checkpoint.verification import runnable
from onebasin.data.calibration import from_file, recut, self_generated
from onebasin.data.teaching import forward_of
from onebasin.fusion import METHODS, merged_tensors, nearest_to_mean
from onebasin.fusion.progressive import merge_progressively
from onebasin.matching import Matched, match_universe, match_weights, soft_couplings
from onebasin.matching.activations import match_activations
from onebasin.matching.cost import tensors_held
from onebasin.matching.learned import match_learned
from onebasin.symmetry import LEVELS, Alignment, Group, Signature, acting_groups
from onebasin.symmetry.coupling import Softened
from onebasin.symmetry.widths import widening

Model = str | Path | PreTrainedModel
Tell = Callable[[str], None]

MATCH_WITH = ("weights", "activations", "learned")
LEARNING_BATCH = 16
STREAM_LEVELS = ("orthogonal", "full", "invertible")


@dataclass(frozen=True)
class Options:
    """How to match: the levels are in `onebasin.symmetry.levels`, the descent in `onebasin.matching.match_weights`.

    match_with: weights, the activations on calibration data, or learned: from `start` (weights or activations), `steps`
    steps of gradient descent on what the average of the two predicts there. data: those data, `self` (causal language
    models write them) or a file; samples: how many sequences or images; task, context, vocabulary: as in
    `onebasin.data.load_task`.
    """

    symmetry: str = "paper"
    rescale: str = "joint"
    parts: Collection[str] | None = None
    layers: Collection[int] | None = None
    precision: str = "float32"
    device: str = "cpu"
    family: str | None = None
    starts: int = 1
    seed: int = 0
    tolerance: float = 1e-6
    max_sweeps: int = 100
    tensor_weights: Mapping[str, float] = field(default_factory=dict)
    match_with: str = "weights"
    start: str = "weights"
    steps: int = 200
    data: str | None = None
    task: str | None = None
    samples: int = 256
    context: int | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision '{self.precision}': the mathematics runs in float32 or float64")
        _on_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def measures(self) -> bool:
        """Whether matching looks at what the models do on calibration data."""
        for option, given in (("match-with", self.match_with), ("start", self.start)):
            if given not in MATCH_WITH:
                raise ValueError(f"{option} '{given}': choose one of {', '.join(MATCH_WITH)}")
        if self.start == "learned":
            raise ValueError("start 'learned': learning starts from weights or activations")
        return self.match_with != "weights"

    @property
    def descent(self) -> dict[str, Any]:
        """What `match_weights` and `match_universe` are told about the descent."""
        return {
            "weights": self.weight,
            "tolerance": self.tolerance,
            "max_sweeps": self.max_sweeps,
            "starts": self.starts,
            "seed": self.seed,
        }

    def weight(self, role: str) -> float:
        """A tensor's weight in the objective: that of the first given name part that its role contains, else 1."""
        return next((weight for part, weight in self.tensor_weights.items() if part in role), 1.0)


def match(
    source: Model,
    anchor: Model,
    output: str | Path | None = None,
    *,
    alignment: str | Path | None = None,
    anchor_output: str | Path | None = None,
    adapter: str | Path | None = None,
    adapter_output: str | Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    tell: Tell | None = None,
    command: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Rewrite `source` as the functionally identical model that lies closest to `anchor`.

    output: folder to write (None: the result holds the rewritten `model` instead, and `anchor_model`, the anchor's
    canonical form, where the level rotates the residual stream). alignment: file to save the group
    elements in. anchor_output: where levels that rotate the residual stream write the anchor's canonical form, which
    is what the output is close to (default: output + "-anchor"). adapter: folder of a LoRA adapter of the source, which
    is rewritten with it and written to adapter_output (default: output + "-adapter"). dtype: of the weights written
    (default: the source's). verify: compare outputs on random inputs before anything is moved into place. options:
    fields of `Options`.

    Returns {"output", "anchor", "distance_before", "distance_after", "max_output_difference", "seconds", ...}.
    Raises ValueError (CheckpointError, TableError) with one clear sentence for what cannot be matched, and for an
    output that would differ from the source beyond rounding; nothing is written then.
    """
    started = time.perf_counter()
    opt, stored = Options(**options), _stored(dtype)
    with _checkpoints([source, anchor], opt.family) as given, _workplace(output) as target:
        _refuse_existing(target, given, overwrite)
        beside = Path(f"{str(output).rstrip('/')}-anchor") if output is not None else target.with_name("anchor")
        beside = Path(anchor_output) if anchor_output else beside
        if opt.symmetry in STREAM_LEVELS:
            _refuse_existing(beside, given, overwrite)
        lora = None if adapter is None else _Lora.of(adapter, adapter_output, output, given[0], opt, overwrite)
        if verify:
            _runnable(given[0])
        first, second = (_gauge(checkpoint, opt, tell) for checkpoint in given)
        first = _widened(first, second)
        if lora is not None and isinstance(first, Widened):
            raise ValueError(f"'{first.given}' is widened to the anchor's sizes, which its adapter cannot follow")
        found = _align(first, second, opt, tell)
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": second.given,
            "symmetry": opt.symmetry,
            "rescale": opt.rescale,
            "distance_before": found.before.distance,
            "distance_after": found.after.distance,
            "objective": found.objective,
        }
        result["max_output_difference"] = _verified(given[0], first, found.alignment, opt, tell) if verify else None
        result["notes"] = list(dict.fromkeys([*first.notes, *found.notes]))
        record = _Record("match", command, given, opt, result, [found])

        def complete(folder: Path) -> None:
            """What belongs to the output is written before anyone sees the output."""
            record.write(folder)
            if alignment is not None:
                _save(found.alignment, alignment)
                result["alignment"] = str(alignment)
            if isinstance(second, Canonical):
                _write_canonical(second, beside, overwrite, dtype, verify)
            if lora is not None:
                moved = transported(lora.adapter, lora.fitted, found.alignment, opt.dtype, lora.tensors)
                write_adapter(lora.adapter, moved, lora.output, output or "", overwrite)
                result["adapter_output"] = str(lora.output)

        if tell:
            tell("writing")
        write_model(
            target,
            _tensors(first, found.alignment, opt),
            first,
            overwrite=overwrite,
            dtype=stored,
            config_updates=first.config_updates,
            check=complete,
        )
        if isinstance(second, Canonical) and (output is not None or anchor_output):
            result["anchor_output"] = str(beside)
        if output is None:
            result["model"] = load_model(target)
            if isinstance(second, Canonical):
                result["anchor_model"] = load_model(beside)
    result["seconds"] = round(time.perf_counter() - started, 3)
    return result


def merge(
    models: Sequence[Model],
    output: str | Path | None = None,
    *,
    method: str = "average",
    weights: Sequence[float] | None = None,
    match: str = "paper",
    anchor: int | str = "auto",
    heads_from: int | None = None,
    soft: float | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    tell: Tell | None = None,
    command: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Match every model to an anchor, then merge them into one.

    method: one of `METHODS`, or "progressive": layer by layer on calibration data. weights: one per model (default:
    equal); they are used as given. match: "none" or a level of symmetry. anchor: the model that stays as it is, counted
    from 0, or "auto": the one nearest to the mean of all. heads_from: the model whose task head, labels and
    configuration the result takes (default: the anchor). soft: temperature of a coupling that mixes FFN neurons after
    matching (semi-permutations; the mixed models are then no longer the same functions). verify: check that every
    matched model still computes its source's function.

    Returns as `match`, with lists over the matched models. Raises ValueError as `match` does.
    """
    started = time.perf_counter()
    if match != "none" and match not in LEVELS:
        raise ValueError(f"unknown --match '{match}'; choose from none, {', '.join(LEVELS)}")
    if method not in (*METHODS, "progressive"):
        raise ValueError(f"unknown method '{method}'; choose from {', '.join((*METHODS, 'progressive'))}")
    if len(models) < 2:
        raise ValueError("merging needs at least two models")
    shares, stored = _weights(weights, len(models)), _stored(dtype)
    opt = Options(**options, symmetry=match if match != "none" else "paper")
    with _checkpoints(models, opt.family) as given, _workplace(output) as target:
        _refuse_existing(target, given, overwrite)
        for checkpoint in given if verify and match != "none" else []:
            _runnable(checkpoint)
        _in_range("heads-from", heads_from, len(models))
        if anchor != "auto":
            _in_range("anchor", int(anchor), len(models))
        gauged = [_gauge(checkpoint, opt, tell) if match != "none" else checkpoint for checkpoint in given]
        widest = max(range(len(gauged)), key=lambda i: _numel(gauged[i]))
        gauged = [_widened(model, gauged[widest if anchor == "auto" else int(anchor)]) for model in gauged]
        shared = _common_roles(gauged)
        if anchor != "auto":
            centre = int(anchor)
        elif any(isinstance(model, Widened) for model in gauged):
            centre = widest
        else:
            centre = nearest_to_mean(gauged, shared.roles, shares)
        found, alignments = _align_all(gauged, centre, match, opt, tell)
        layout = centre if heads_from is None else heads_from
        notes = [*gauged[layout].notes, *(note for item in found for note in item.notes)]
        if shared.differing:
            notes.append(f"copied from model {layout} ({given[layout].given}), since the models differ there: "
                         + ", ".join(shared.differing))  # fmt: skip
        differences = [
            _verified(given[i], gauged[i], alignments[i], opt, tell) if verify and match != "none" else None
            for i in range(len(gauged))
            if i != centre
        ]
        rewrites: list[Alignment | Softened] = list(alignments)
        if soft is not None:
            rewrites = [
                alignment if i == centre else _softened(gauged[i], gauged[centre], alignment, soft, opt)
                for i, alignment in enumerate(alignments)
            ]
            notes.append("soft couplings: the mixed models are no longer the same functions as their sources")
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": centre,
            "method": method,
            "match": match,
            "weights": shares,
            "distance_before": [item.before.distance for item in found],
            "distance_after": [item.after.distance for item in found],
            "objective": found[0].objective,
            "max_output_difference": differences,
        }
        result["notes"] = list(dict.fromkeys(notes))
        record = _Record("merge", command, given, opt, result, found)
        tensors: Iterator[tuple[str, Tensor]]
        if method == "progressive":
            batches = _calibration(gauged, opt, tell)
            fitted = merge_progressively(gauged, alignments, shares, layout, set(shared.roles), batches,
                                         dtype=opt.dtype, device=opt.device, tell=tell)  # fmt: skip
            result["ridge"], result["held_back_losses"] = fitted.ridge, {str(r): x for r, x in fitted.losses.items()}
            entries = gauged[layout].signature.tensors
            tensors = (
                pair for role, entry in entries.items() if entry.stored for pair in entry.split(fitted.tensors[role])
            )
        else:
            tensors = merged_tensors(gauged, rewrites, shares, layout, set(shared.roles), method=method,
                                     dtype=opt.dtype, device=opt.device)  # fmt: skip
        if tell:
            tell("writing")
        write_model(
            target,
            tensors,
            gauged[layout],
            overwrite=overwrite,
            dtype=stored,
            config_updates=gauged[layout].config_updates,
            check=record.write,
        )  # fmt: skip
        if output is None:
            result["model"] = load_model(target)
    result["seconds"] = round(time.perf_counter() - started, 3)
    return result


def check(
    a: Model,
    b: Model,
    *,
    symmetry: str = "paper",
    peek: bool = False,
    precision: str = "float32",
    family: str | None = None,
) -> dict[str, Any]:
    """Whether `a` can be matched to `b`, and what to expect, from configs and headers; no weights are read.

    peek: read one small matrix of each as well, and give their cosine.

    Returns {"can_match", "reason", "symmetry", "moves", "fixed", "rows", "heads", "only_a", "only_b", "widened",
    "untied", "vocabulary", "ancestors", "common_ancestors", "peek", "memory", "verify_memory"}; memory is level ->
    bytes. Raises ValueError for folders that cannot be read and an unknown level.
    """
    item = Options(symmetry=symmetry, precision=precision).dtype.itemsize
    with _checkpoints([a, b], family) as (first, second):
        found = preflight(first, second, symmetry, symmetry in STREAM_LEVELS)
        words = vocabulary(first, second)
        named = [ancestors(model) for model in (first, second)]
        both = [{model.given.rstrip("/"), *names} for model, names in zip((first, second), named, strict=True)]
        small = peeked(first, second, found) if peek and found.reason is None else None
        memory = {}
        if found.signature is not None:
            whole = _numel(first) + _numel(second)
            for level in LEVELS:
                seen = preflight(first, second, level, level in STREAM_LEVELS)
                if seen.signature is not None:
                    held = tensors_held(seen.signature, seen.roles, acting_groups(seen.signature, level))
                    # Canonical forms are held whole; only what moves is held beside them.
                    memory[level] = item * (held + whole if level in STREAM_LEVELS else 2 * held)
        verifying = 2 * item * _numel(first) if found.reason is None else None
    return {
        "can_match": found.reason is None,
        "reason": found.reason,
        "symmetry": symmetry,
        "moves": found.moves,
        "fixed": found.fixed,
        "rows": found.rows,
        "heads": list(found.heads),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "widened": found.widened,
        "untied": found.untied,
        "vocabulary": None if words is None else asdict(words),
        "ancestors": named,
        "common_ancestors": sorted(both[0] & both[1]),
        "peek": None if small is None else {"tensor": small[0], "cosine": small[1]},
        "memory": memory,
        "verify_memory": verifying,
    }


def verify(a: Model, b: Model, *, family: str | None = None, **how: Any) -> Verification:
    """Do two models compute the same function? Random valid inputs; see `onebasin.checkpoint.compare`."""
    _on_device(how.get("device", "cpu"))
    with _checkpoints([a, b], family) as (first, second):
        return compare(first.folder, second.folder, **how)


def distance(a: Model, b: Model, *, family: str | None = None) -> Distances:
    """Euclidean distance over the parameters that two models share: whole, per part, per layer."""
    with _checkpoints([a, b], family) as (first, second):
        return distances(first, second)


def canonical(
    model: Model,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    family: str | None = None,
    precision: str = "float32",
) -> dict[str, Any]:
    """Write a model in canonical form: everything that its function does not see is fixed by rule.

    Returns {"output", "max_output_difference", "notes", "seconds"}. Raises ValueError as `match` does.
    """
    started = time.perf_counter()
    opt = Options(symmetry="full", family=family, precision=precision)
    with _checkpoints([model], family) as given:
        _refuse_existing(Path(output), given, overwrite)
        if verify:
            _runnable(given[0])
        form = Canonical(given[0], opt.dtype)
        difference = _write_canonical(form, Path(output), overwrite, dtype, verify)
    return {
        "output": str(output),
        "max_output_difference": difference,
        "notes": form.notes,
        "seconds": round(time.perf_counter() - started, 3),
    }


# --- pieces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A source's alignment to its anchor, and the distances before and after it."""

    alignment: Alignment
    before: Distances
    after: Distances
    objective: list[float]
    notes: list[str]


def _align(source: Checkpoint, anchor: Checkpoint, opt: Options, tell: Tell | None, identity: bool = False) -> _Found:
    shared = shared_roles(source, anchor)
    before = distances(source, anchor, dtype=opt.dtype)
    notes = [f"heads of different tasks, not matched: {', '.join(shared.differing)}"] if shared.differing else []
    if identity:
        return _Found(Alignment(), before, before, [], [])
    if opt.measures:
        alignment = _align_on_data(source, anchor, shared.roles, opt, tell)
        return _Found(alignment, before, distances(source, anchor, alignment, dtype=opt.dtype), [], notes)
    matched = _match_weights(source, anchor, shared.roles, opt, tell)
    after = distances(source, anchor, matched.alignment, dtype=opt.dtype)
    return _Found(matched.alignment, before, after, matched.objective, notes)


def _align_on_data(
    source: Checkpoint, anchor: Checkpoint, roles: Sequence[str], opt: Options, tell: Tell | None
) -> Alignment:
    groups, batches = _groups(source, opt), _calibration([anchor, source], opt, tell)
    how: dict[str, Any] = {"dtype": opt.dtype, "device": opt.device}
    if opt.match_with == "activations" or opt.start == "activations":
        eager = [stock_model(model, **how, attention="eager") for model in (anchor, source)]
        alignment = match_activations(source.signature, eager[0], eager[1], batches, groups, tell=tell)
    else:
        alignment = _match_weights(source, anchor, roles, opt, tell).alignment
    if opt.match_with == "activations":
        return alignment
    fixed, moving = stock_model(anchor, **how), stock_model(source, **how)
    steps = recut(batches, LEARNING_BATCH)
    learned = match_learned(
        source.signature, fixed.parameter, [moving.parameter], [alignment], groups, forward_of(fixed), steps,
        steps=opt.steps, seed=opt.seed, progress=tell and (lambda what, loss: tell(f"{what}, loss {loss:.4g}")),
    )  # fmt: skip
    return learned.alignments[0]


def _match_weights(
    source: Checkpoint, anchor: Checkpoint, roles: Sequence[str], opt: Options, tell: Tell | None
) -> Matched:
    return match_weights(
        source.signature,
        lambda role: read_pair(anchor, source, role, opt.dtype, opt.device),
        _groups(source, opt),
        roles=roles,
        **opt.descent,
        progress=tell
        and (lambda what, objective: tell(f"matching {source.given}: {what}, distance {objective**0.5:.6g}")),
    )


def _align_all(
    models: Sequence[Checkpoint], centre: int, level: str, opt: Options, tell: Tell | None
) -> tuple[list[_Found], list[Alignment]]:
    """Align all models to `models[centre]`: what was found for the others, and every model's alignment.

    At level `paper` each is matched to the anchor alone. At the other levels three or more models are matched to one
    another, in the anchor's frame.
    """
    others = [i for i in range(len(models)) if i != centre]
    if level in ("none", "paper") or len(models) == 2 or opt.measures:
        found = [_align(models[i], models[centre], opt, tell, identity=level == "none") for i in others]
        alignments = [item.alignment for item in found]
        alignments.insert(centre, Alignment())
        return found, alignments
    roles = _common_roles(models).roles
    tensors: list[dict[str, Tensor]] = [{} for _ in models]
    for role in roles:
        read = [model.read(role, opt.dtype, opt.device) for model in models]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in read), strict=True))
        for mine, tensor in zip(tensors, read, strict=True):
            mine[role] = tensor[corner]
    universe = match_universe(
        [model.signature for model in models],
        tensors,
        [_groups(model, opt) for model in models],
        centre=centre,
        **opt.descent,
        progress=tell
        and (lambda what, objective: tell(f"matching {len(models)} models: {what}, {objective**0.5:.6g}")),
    )
    found = []
    for i in others:
        before = distances(models[i], models[centre], dtype=opt.dtype)
        after = distances(models[i], models[centre], universe.alignments[i], dtype=opt.dtype)
        found.append(_Found(universe.alignments[i], before, after, universe.objective, []))
    return found, universe.alignments


def _calibration(models: Sequence[Checkpoint], opt: Options, tell: Tell | None) -> list[dict[str, Tensor]]:
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
    return from_file(opt.data, models[0].folder, opt.task or _task(models[0]), opt.samples, **given)


def _task(model: Checkpoint) -> str:
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


def _groups(model: Checkpoint, opt: Options) -> dict[str, Group]:
    return acting_groups(model.signature, opt.symmetry, rescale=opt.rescale, parts=opt.parts, layers=opt.layers)


def _softened(
    source: Checkpoint, anchor: Checkpoint, alignment: Alignment, temperature: float, opt: Options
) -> Softened:
    def read(role: str) -> tuple[Tensor, Tensor]:
        fixed, moving = read_pair(anchor, source, role, opt.dtype, opt.device)
        return fixed, alignment.apply(source.signature, role, moving)

    return Softened(alignment, soft_couplings(source.signature, read, _groups(source, opt), temperature))


def _tensors(model: Checkpoint, alignment: Alignment, opt: Options) -> Iterator[tuple[str, Tensor]]:
    """The rewritten model, tensor by tensor. A tensor that nothing moves keeps its exact bits."""
    for role, entry in model.signature.tensors.items():
        tensor = model.read(role, opt.dtype, opt.device)
        yield from entry.split(alignment.apply(model.signature, role, tensor))


def _gauge(checkpoint: Checkpoint, opt: Options, tell: Tell | None) -> Checkpoint:
    """The model in canonical form where the level rotates the residual stream, else as it is."""
    if opt.symmetry not in STREAM_LEVELS:
        return checkpoint
    if tell:
        tell(f"canonical form of {checkpoint.given}")
    return Canonical(checkpoint, opt.dtype)


@dataclass(frozen=True)
class _Lora:
    """An adapter of the source, its signature, its tensors where the source is in canonical form, where it goes."""

    adapter: Adapter
    fitted: Signature
    tensors: dict[str, Tensor] | None
    output: Path

    @classmethod
    def of(
        cls,
        folder: str | Path,
        place: str | Path | None,
        output: str | Path | None,
        base: Checkpoint,
        opt: Options,
        overwrite: bool,
    ) -> _Lora:
        """Fails before any work where the adapter could not be written at the end."""
        if output is None:
            raise ValueError("an adapter is written beside a model: name an output")
        place = Path(place or f"{str(output).rstrip('/')}-adapter")
        adapter = Adapter(folder)
        refuse_adapter(adapter, place, overwrite)
        if place.resolve() in (Path(output).resolve(), base.folder.resolve()):
            raise ValueError(f"the adapter's output '{place}' is that of a model; choose another folder")
        fitted = fit(adapter, base)
        moved = folded(adapter, fitted, base, opt.dtype) if opt.symmetry in STREAM_LEVELS else None
        return cls(adapter, fitted, moved, place)


def _runnable(checkpoint: Checkpoint) -> None:
    """Fail before any work where the model could not be verified; a type without a table is told first."""
    assert checkpoint.signature
    runnable(checkpoint)


def _save(alignment: Alignment, place: str | Path) -> None:
    try:
        alignment.save(place)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the alignment '{place}': {one_line(error)}") from None


def _write_canonical(form: Canonical, output: Path, overwrite: bool, dtype: str | None, verify: bool) -> float | None:
    opt = Options(precision="float64" if form.dtype == torch.float64 else "float32")
    difference = _verified(form, form, Alignment(), opt, None) if verify else None
    write_model(
        output,
        _tensors(form, Alignment(), opt),
        form,
        overwrite=overwrite,
        dtype=_stored(dtype),
        config_updates=form.config_updates,
    )
    return difference


def _widened(model: Checkpoint, wide: Checkpoint) -> Checkpoint:
    """The model in the shapes of a wider one, where the two differ in widths that can be made up exactly."""
    if not isinstance(model, Canonical) or model.signature.family != wide.signature.family:
        return model
    return Widened(model, wide) if widening(model.signature, wide.signature) else model


def _numel(model: Checkpoint) -> int:
    return sum(prod(entry.shape) for entry in model.signature.tensors.values())


def _verified(original: Checkpoint, model: Checkpoint, alignment: Alignment, opt: Options, tell: Tell | None) -> float:
    """The largest output difference between a folder and its rewritten model; CheckpointError where it is not rounding.

    Both run in the precision of the mathematics, the rewritten one from a temporary folder of that precision: weights
    rounded to 16 bits would need a tolerance that hides real errors.
    """
    if tell:
        tell(f"verifying {original.given}")
    verdicts: list[Verification] = []
    stored = original.stored_dtype
    dtype = opt.dtype if stored.itemsize <= opt.dtype.itemsize else stored

    def check(folder: Path) -> None:
        tolerance = tolerance_of(opt.dtype)
        verdicts.append(compare(original.folder, folder, dtype=dtype, device=opt.device, tolerance=tolerance))

    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "model"
        write_model(target, _tensors(model, alignment, opt), model, dtype=dtype,
                    config_updates=model.config_updates, check=check)  # fmt: skip
    verdict = verdicts[0]
    if not verdict.same:
        raise CheckpointError(
            f"the rewritten '{original.given}' differs from the original by {verdict.max_difference:.3g} "
            f"(relative {verdict.relative_difference:.3g}, allowed {verdict.tolerance:.3g}); nothing was written"
        )
    return verdict.max_difference


@dataclass
class _Record:
    """What is written beside the weights: README.md and onebasin.json."""

    job: str
    command: str | None
    inputs: Sequence[Checkpoint]
    options: Options
    result: Mapping[str, Any]
    found: Sequence[_Found]

    def write(self, folder: Path) -> None:
        command = self.command or f"onebasin.{self.job}(...)"
        before, after = [item.before for item in self.found], [item.after for item in self.found]
        options = {key: value for key, value in asdict(self.options).items() if value is not None}
        facts = provenance(
            self.inputs, command=command, options=options, result=self.result, before=before, after=after
        )
        card = model_card(self.inputs, command=command, result=self.result, before=before, after=after)
        (folder / "README.md").write_text(card, "utf-8")
        (folder / "onebasin.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


@dataclass(frozen=True)
class _Common:
    roles: list[str]
    differing: list[str]


def _common_roles(models: Sequence[Checkpoint]) -> _Common:
    """Roles that all models share, and those that only some have or that differ in their labels."""
    pairs = [shared_roles(model, models[0]) for model in models[1:]]
    roles = [role for role in pairs[0].roles if all(role in pair.roles for pair in pairs)]
    kept = set(roles)
    differing = [role for model in models for role, entry in model.signature.tensors.items()
                 if role not in kept and entry.alias is None]  # fmt: skip
    return _Common(roles, list(dict.fromkeys(differing)))


@contextmanager
def _checkpoints(models: Sequence[Model], family: str | None) -> Iterator[list[Checkpoint]]:
    """Open every model; `PreTrainedModel` objects go through a temporary folder. All are closed afterwards."""
    with tempfile.TemporaryDirectory() as temporary:
        opened = []
        try:
            for number, model in enumerate(models):
                if isinstance(model, PreTrainedModel):
                    folder = Path(temporary) / f"model-{number}"
                    model.save_pretrained(folder)
                    opened.append(Checkpoint(folder, family))
                    opened[-1].given = model.name_or_path or type(model).__name__
                else:
                    opened.append(Checkpoint(model, family))
            yield opened
        finally:
            for checkpoint in opened:
                checkpoint.close()


@contextmanager
def _workplace(output: str | Path | None) -> Iterator[Path]:
    """Where to write: the output, or a temporary folder that lives as long as the block."""
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "model"


def _refuse_existing(output: Path, inputs: Sequence[Checkpoint], overwrite: bool) -> None:
    """Fail before any work where the output could not be written at the end."""
    if any(output.resolve() == checkpoint.folder.resolve() for checkpoint in inputs):
        raise CheckpointError(f"the output '{output}' is one of the inputs; choose another folder")
    if output.exists() and not overwrite:
        raise CheckpointError(f"the output folder '{output}' exists; choose another or pass --overwrite")


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"{count} models need {count} weights, not {len(weights)}")
    if not all(abs(weight) < float("inf") for weight in weights):
        raise ValueError("weights must be finite numbers")
    return [float(weight) for weight in weights]


def _stored(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}'; choose from {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _on_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError):  # torch raises either
        raise ValueError(f"the device '{name}' is not available here; choose another, such as cpu") from None


def _in_range(option: str, number: int | None, count: int) -> None:
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--{option} {number}: the {count} models count from 0 to {count - 1}")
