# SPDX-License-Identifier: Apache-2.0
"""Calibration data: inputs on which activations are measured. They hold no example that a model is evaluated on, and
labels only for learning on the task's own loss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebasin.engine import Means, Tell
from onebasin.models import Model, numel
from onebasin.running.trace import Batch, examples, examples_in
from onebasin.settings import Count, ExampleKeywords, Examples, Reading, Seeded, Strength, checked, setting

from .batches import IGNORED, Source, pixel_values
from .digits import digits
from .files import kind, read_rows, split_off
from .made import SEVERAL, SURE, guessed, made, usual_length
from .models import configured
from .tasks import Task, load_batches
from .teaching import HELD_OUT, split_held_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

Split = tuple[Sequence[Batch], Sequence[Batch]]  # batches to fit on, and to choose by
SHOWN = ("input_ids", "pixel_values", "input_features")  # to a model
SIDES = ("", "decoder_")  # the names of texts begin with these
NOISY_COPIES = 8  # of every example
JUDGED, FEW = 128, 16  # examples to judge a model on, and a large one
LARGE = 10**8  # numbers of a model


@dataclass(frozen=True)
class Calibration(Reading, Seeded):
    """The calibration data of a job.

    data: `self` (made by the models, see `onebasin.data.made`), a file, or several of these.
    """

    section: ClassVar[str] = "Data"

    data: str | Path | Sequence[str | Path] | None = setting(
        None,
        "Calibration data: self (made by the models), or any that onebasin evaluate takes; labels are not needed. "
        "Several, separated by commas, share the samples, or belong to one model each (fisher, regmean).",
    )
    samples: Count = setting(256, "Calibration sequences or images.")
    task: str | None = setting(None, "Task of the calibration data [default: by the model's class].")
    noise: Strength = setting(0.0, "Standard deviation of noise on 8 copies of every calibration image (or sound).")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.datasets:
            file = split_off(name)[0]
            if name != "self" and not name.startswith("builtin:") and kind(file) != "hub" and not os.path.exists(file):
                raise ValueError(f"cannot read the data file '{file}': No such file or directory")

    @property
    def datasets(self) -> list[str]:
        """Return the names of all datasets."""
        return [str(self.data)] if isinstance(self.data, str | Path) else [str(name) for name in self.data or ()]

    @property
    def self_made(self) -> bool:
        """Whether the models make the data themselves, or none are named."""
        return self.data in (None, "self")

    @property
    def data_files(self) -> list[Path]:
        """Return those that are files or folders."""
        named = [*(split_off(name)[0] for name in self.datasets), self.vocabulary]
        return [Path(name) for name in named if isinstance(name, str) and os.path.exists(name)]


@dataclass(frozen=True)
class Data:
    """The calibration data of a job, gathered on first use.

    models: those that the inputs are for, and that make them. labels: whether to keep labels.
    """

    models: Sequence[Model]
    given: Calibration
    means: Means
    tell: Tell | None = None
    labels: bool = False

    def refuse_none(self) -> None:
        """Raise ValueError where no data are named."""
        if not self.given.data:
            raise ValueError("calibration data are missing: --data FILE, or --data self, which the models make")

    @cached_property
    def batches(self) -> list[Batch]:
        """Return all batches. Raises ValueError as `calibration` does."""
        self.refuse_none()
        return calibration(self.models, self.given, self.means, self.tell, self.labels)

    @cached_property
    def judged(self) -> list[Batch]:
        """Return inputs to judge a merged model on, which nothing was fitted to. These are the data beyond those that
        methods are fitted to or, if there are no more, the last of them, which every method holds out. Without data,
        the models make some; large models make none, since that takes many passes.
        """
        first, opt = self.models[0], replace(self.given, seed=self.given.seed + 1)
        large = numel(first) > LARGE
        if self.given.self_made:
            if large:
                return []
            usual = usual_length(guessed(first))
            length = min(usual, first.config.get("max_position_embeddings") or usual)
            context = self.given.context or (length if self.given.data is None else None)
            return made(self.models, JUDGED, replace(opt, context=context), seed=opt.seed, means=self.means, steps=SURE)
        count = FEW if large else JUDGED
        opt = replace(opt, samples=self.given.samples + count * len(self.given.datasets))
        found = calibration(self.models, opt, self.means, self.tell)
        if "self" in opt.datasets:
            return found
        return recut(found, SEVERAL)[-(-self.given.samples // SEVERAL) :] or found[-1:]

    @cached_property
    def split(self) -> Split:
        """Return the batches to fit on, and those to choose by, as `noised` does."""
        return noised(self.batches, self.given)

    def of(self, model: Model, number: int = 0, count: int = 1, labels: bool = False) -> Data:
        """Return the data of one of `count` models: its own if each has a dataset, otherwise the common data."""
        own = replace(self.given, data=own_data(self.given.datasets, count)[number])
        return Data([model], own, self.means, self.tell, labels)


def calibration(
    models: Sequence[Model], given: Calibration, means: Means, tell: Tell | None = None, labels: bool = False
) -> list[Batch]:
    """Return inputs to measure on: made by the models themselves, or read from files, each with its share of the
    samples.

    Masked language models always keep their labels, which come from the text itself and tell which tokens were hidden.

    Args:
        models: those that the inputs are for; the tokenizer of the first reads the files.
        given: which data.
        means: the device on which models make their inputs.
        tell: called with a sentence before it begins.
        labels: whether to keep labels.

    Raises:
        ValueError: as `load_task` does.
    """
    if tell:
        tell("gathering calibration data")
    share = -(-given.samples // len(given.datasets))
    found: list[Sequence[Batch]] = []
    for file in given.datasets:
        if file == "self":
            written = made(models, share, given, seed=given.seed, means=means)
            found.append([{**batch, "labels": batch["input_ids"]} if labels and "labels" not in batch else batch
                          for batch in written])  # fmt: skip
        else:
            task = given.task or task_of(models[0])
            size = max(1, min(32, int(HELD_OUT * share)))  # so that a sixteenth of a few examples can be held out
            kept = labels or (task == "masked-lm" and all(is_for(model, task) for model in models))
            where = models[0].origin.folder
            found.append(from_file(file, where, task, share, batch=size, labels=kept, **given.reading))
    return spread_evenly(found)


def spread_evenly(groups: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return all batches in one row, with every group spread evenly, so that the batches held out at its end have their
    share of each group."""
    placed = [((i + 0.5) / len(group), number, batch) for number, group in enumerate(groups)
              for i, batch in enumerate(group)]  # fmt: skip
    return [batch for _, _, batch in sorted(placed, key=lambda one: one[:2])]


def noised(batches: Sequence[Batch], given: Calibration, share: float | None = None) -> Split:
    """Return calibration data to fit on, and data to choose by, with all copies of an example on the same side.

    Args:
        batches: all of them.
        given: whether to add noisy copies.
        share: of the batches to choose by. None holds out some only where there are noisy copies, which make up for the
            batches that the fit loses; otherwise each method holds out its own.
    """
    if share is None and not given.noise:
        return batches, []
    fit, held = split_held_out(batches, None, share or 2 * HELD_OUT)
    if not given.noise:
        return fit, held
    return [*noisy(fit, given.noise, given.seed)], [*noisy(held, given.noise, given.seed + 1)]


def own_data(data: Sequence[str], count: int) -> list[str | None]:
    """Return the data of each model: its own, or the same for all, or none. Raises ValueError for any other number of
    datasets."""
    if not data:
        return [None] * count
    if len(data) not in (1, count):
        raise ValueError(f"{count} models are measured on one dataset, or on one of their own each, not on {len(data)}")
    return [*data] if len(data) == count else [data[0]] * count


def task_of(model: Model) -> str:
    """Return the task of a model's class. Raises ValueError for a class without a head."""
    names = " ".join(model.config.get("architectures") or [])
    if "SequenceClassification" in names and len(model.config.get("id2label") or "two") == 1:
        return "text-regression"
    for ending, task in (
        ("MaskedLM", "masked-lm"),
        ("LM", "causal-lm"),
        ("ImageClassification", "image-classification"),
        ("SequenceClassification", "text-classification"),
        ("TokenClassification", "token-classification"),
    ):
        if ending in names:
            return task
    raise ValueError(f"'{model.name}': its class does not name the task of the calibration data; say --task")


def is_for(model: Model, task: str) -> bool:
    """Return whether a model's class is for this task."""
    try:
        return task_of(model) == task
    except ValueError:
        return False


def noisy(batches: Sequence[Batch], deviation: float, seed: int = 0) -> list[Batch]:
    """Return `NOISY_COPIES` copies of the batches, with Gaussian noise on their pixels or sounds.

    Args:
        batches: Examples; those of a batch stay together.
        deviation: The standard deviation of the noise.
        seed: Of the noise.

    Raises:
        ValueError: The deviation is out of bounds, or the batches hold tokens.
    """
    deviation = checked(Strength, "noise", deviation)
    if any(not value.is_floating_point() for batch in batches for name, value in batch.items() if name in SHOWN):
        raise ValueError("noise can be added to pixels and sounds, not to tokens; leave it out")
    generator = torch.Generator().manual_seed(seed)

    def copied(name: str, value: Tensor) -> Tensor:
        return value + deviation * torch.randn(value.shape, generator=generator) if name in SHOWN else value

    return [
        {name: copied(name, value) for name, value in batch.items()} for _ in range(NOISY_COPIES) for batch in batches
    ]


def recut(batches: Sequence[Batch], size: int, by_length: bool = False) -> list[Batch]:
    """Return the same examples in the same order, `size` in a batch (the last may have fewer). by_length: batch texts
    of similar length together, which saves padding."""
    rows = [row for batch in batches for row in _examples(batch)]
    if by_length:
        rows.sort(key=lambda row: row["input_ids"].shape[1] if "input_ids" in row and row["input_ids"].dim() > 1 else 0)
    return [_stacked(rows[start : start + size]) for start in range(0, len(rows), size)]


def from_file(
    data: str | Path,
    model: str | Path,
    task: str,
    count: int = 256,
    *,
    evaluation: Task | None = None,
    labels: bool = False,
    **how: Unpack[ExampleKeywords],
) -> list[Batch]:
    """Return examples of a file or builtin set in batches of a model's inputs.

    Args:
        data: As in `load_task`, with or without labels; classifiers read the column `text` or `image`.
        model: The folder of the model.
        task: As in `load_task`.
        count: How many examples at most.
        evaluation: The task that the models will be evaluated on; examples with the same inputs are left out.
        labels: Whether to keep them.
        how: The fields of `Examples`; the split is by default `train`, where the data have splits.

    Raises:
        ValueError: As in `load_task`, and where nothing is left.
    """
    text = str(data)
    split = "train" if text.startswith("builtin:") or kind(text) in ("txt", "datasets", "hub") else None
    banned = set() if evaluation is None else {_key(row) for b in evaluation.batches for row in _examples(b)}
    kept: list[Batch] = []
    read = Examples.of({"limit": None if banned else count, "batch": 32, **how, "split": how.get("split") or split})
    batches = load_batches(task, text, model, read) if labels else _inputs(text, model, task, read)
    for inputs in batches:
        kept += [row for row in _examples(inputs) if _key(row) not in banned]
        if len(kept) >= count:
            break
    if not kept:
        raise ValueError(f"all examples of '{data}' are evaluated on too; give other calibration data")
    if not labels:
        kept = [{name: tensor for name, tensor in row.items() if name != "labels"} for row in kept]
    kept = kept[:count]
    sounds = kept[0].keys() & {"input_features", "input_values"}  # which have thousands of positions
    batch = 1 if sounds else read.batch
    return [_stacked(kept[start : start + batch]) for start in range(0, len(kept), batch)]


def _inputs(data: str, model: str | Path, task: str, how: Examples) -> Sequence[Batch]:
    if data == "builtin:digits":
        return [{"pixel_values": digits(how.split or "train")[0]}]
    if task == "token-classification" and (kind(data) == "txt" or "tokens" in read_rows(data, (), limit=1)[0]):
        how = replace(how, split=None) if kind(data) == "txt" else how  # CoNLL columns: to tell words from their tags
    elif task in ("text-classification", "text-regression", "token-classification"):
        task = "causal-lm"  # a classifier has the inputs of any text; only labels differ
    if task == "image-classification":
        folder, config = configured(model)
        rows = read_rows(data, ("image",), split=how.split, limit=how.limit, renamed=how.columns)
        return [{"pixel_values": pixel_values(Source(data, folder, config, how), rows)}]
    return load_batches(task, data, model, how)


def _examples(batch: Batch) -> Sequence[Batch]:
    """Return the examples of a batch, each a batch of its own without padding."""
    rows = [dict(examples(batch, i, i + 1)) for i in range(examples_in(batch))]
    for row in rows:
        for side in SIDES:
            if (mask := f"{side}attention_mask") in (names := _text(row, side)):
                length = int(row[mask].sum())
                row.update({name: row[name][:, :length] for name in names})
    return rows


def _text(row: Batch, side: str) -> list[str]:
    """Return the names of the tensors of an example that have an entry for each token of a side's text."""
    ids = row.get(f"{side}input_ids")
    if ids is None or ids.dim() != 2:
        return []
    read = ("decoder_", "labels") if "decoder_input_ids" in row else "decoder_"  # by the decoder
    return [name for name, x in row.items() if x.shape == ids.shape and name.startswith(read) == bool(side)]


def _key(row: Batch) -> bytes:
    """Return what identifies an example: its tokens, pixels or sounds."""
    shown = next(row[name] for name in SHOWN if name in row)
    return hashlib.sha256(shown.contiguous().numpy().tobytes()).digest()


def _stacked(rows: list[Batch]) -> Batch:
    """Return one batch. Texts are padded at the right, with an attention mask where lengths differ; those that decoders
    read are cut to the shortest, since an attention mask does not say which of their predictions count."""
    for side in SIDES:
        if not (names := _text(rows[0], side)):
            continue
        lengths = [row[f"{side}input_ids"].shape[1] for row in rows]
        if side:
            rows = [{**row, **{name: row[name][:, : min(lengths)] for name in names}} for row in rows]
        elif len(set(lengths)) > 1:
            names = list(dict.fromkeys([*names, "attention_mask"]))
            rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
            most, filled = max(lengths), {"labels": IGNORED}
            rows = [{**row, **{name: pad(row[name], (0, most - length), value=filled.get(name, 0)) for name in names}}
                    for row, length in zip(rows, lengths, strict=True)]  # fmt: skip
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
