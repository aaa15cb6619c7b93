# SPDX-License-Identifier: Apache-2.0
"""The steps that every study of fusion takes: match folders, merge them, score what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

import onebasin
from onebasin.checkpoint import Checkpoint
from onebasin.data import Task, evaluate, load_model, load_task

from .config import Config, Corpus, Matching

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Matched:
    """folders: all models in one frame, the anchor first. seconds: of matching, without verification."""

    folders: list[str]
    before: list[float]
    after: list[float]
    seconds: float


@contextmanager
def matched(models: Sequence[str], matching: Matching) -> Iterator[Matched]:
    """The models after each was matched to the first; the folders live as long as the block."""
    if matching is None:
        gaps = [onebasin.distance(model, models[0]).distance for model in models[1:]]
        yield Matched(list(models), gaps, gaps, 0.0)
        return
    with TemporaryDirectory() as temporary:
        folders, before, after, seconds = [models[0]], [], [], 0.0
        for number, model in enumerate(models[1:], 1):
            found = onebasin.match(model, models[0], Path(temporary) / str(number), verify=False, **matching)
            # A level that moves the residual stream gives the anchor a canonical form, the same for every source.
            folders[0] = found.get("anchor_output", models[0])
            folders.append(found["output"])
            before.append(found["distance_before"])
            after.append(found["distance_after"])
            seconds += found["seconds"]
        yield Matched(folders, before, after, seconds)


def merged(folders: Sequence[str], method: str, config: Config, corpora: Sequence[Corpus]) -> PreTrainedModel:
    """Matched folders merged by `method`; methods that measure on data do so on the corpora's calibration files."""
    data = [split_off(corpus.calibration)[0] for corpus in corpora if corpus.calibration]
    options: dict[str, Any] = {"data": data[0] if len(data) == 1 else data} if data else {}
    found = onebasin.merge(
        list(folders), method=method, match="none", anchor=0, verify=False, samples=config.samples, task=config.task,
        **options, **{key: value for key, value in config.options.items() if key in ("context", "vocabulary")},
    )  # fmt: skip
    model: PreTrainedModel = found["model"]
    return model


def score(model: PreTrainedModel, task: Task, config: Config) -> float:
    """The study's metric: accuracy, loss, or another that the task has."""
    found: float = getattr(evaluate(model, task), config.metric.replace("-", "_"))
    return found


def under_head_of(folder: str, body: PreTrainedModel, config: Config) -> PreTrainedModel:
    """The merged body under the head that `folder` brings: "the classifier module is directly copied from the model
    fine-tuned on the corresponding downstream task" (Zhang et al., 2025, section 5.1)."""
    model = load_model(folder, config.task)
    model.base_model.load_state_dict(body.base_model.state_dict())
    return model


def test_of(corpus: Corpus, model: str, config: Config) -> Task:
    """What a corpus's scores are measured on, as `model` reads it."""
    return _task(corpus.test, model, config)


def validation_of(corpus: Corpus, model: str, config: Config) -> Task:
    """What choices are made by. Raises ValueError where the corpus names none."""
    if corpus.validation is None:
        raise ValueError(f"corpus '{corpus.name}' names no validation data, which layers: auto chooses by")
    return _task(corpus.validation, model, config)


def pairs(config: Config) -> list[tuple[int, int]]:
    """Every two models, counted from 0."""
    return list(combinations(range(len(config.models)), 2))


def fused(config: Config, run: Sequence[str], members: Sequence[int], matching: Matching) -> dict[str, list[float]]:
    """Method -> the merged members' score on each member's corpus.

    `layers: auto` matches one layer at a time and keeps, per method, the one that scores best on validation data
    (Zhang et al., 2025, section 5.2, the protocol for ViTs).
    """
    models, corpora = [run[i] for i in members], [config.corpus(i) for i in members]
    auto = matching is not None and matching.get("layers") == "auto"
    tried = [{**(matching or {}), "layers": [layer]} for layer in layers_of(models[0])] if auto else [matching]
    best: dict[str, tuple[float, list[float]]] = {}

    def scores(bodies: Sequence[PreTrainedModel], of: Callable[[Corpus, str, Config], Task]) -> list[float]:
        return [score(body, of(corpus, model, config), config)
                for body, corpus, model in zip(bodies, corpora, models, strict=True)]  # fmt: skip

    for one in tried:
        with matched(models, one) as found:
            for method in config.methods:
                body = merged(found.folders, method, config, corpora)
                bodies = [body] * len(models)
                if len(config.corpora) > 1:
                    bodies = [under_head_of(folder, body, config) for folder in found.folders]
                chosen = 0.0
                if auto:
                    chosen = sum(scores(bodies, validation_of)) * (-1 if config.metric == "loss" else 1)
                if method not in best or chosen > best[method][0]:
                    best[method] = chosen, scores(bodies, test_of)
    return {method: found for method, (_, found) in best.items()}


def layers_of(model: str) -> list[int]:
    """The numbers of a model's layers."""
    checkpoint = Checkpoint(model)
    try:
        return checkpoint.signature.layers
    finally:
        checkpoint.close()


def split_off(data: str) -> tuple[str, str | None]:
    """`builtin:digits#train` -> the data and the split."""
    name, mark, split = data.rpartition("#")
    return (name, split) if mark else (data, None)


def _task(data: str, model: str, config: Config) -> Task:
    name, split = split_off(data)
    return _loaded(config.task, name, model, split, config.limit, tuple(sorted(config.options.items())))


@cache
def _loaded(task: str, data: str, model: str, split: str | None, limit: int | None, options: Any) -> Task:
    """Reading and tokenising once: many settings are scored on the same examples."""
    return load_task(task, data, model, split=split, limit=limit, **dict(options))
