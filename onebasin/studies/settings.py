# SPDX-License-Identifier: Apache-2.0
"""The steps that all studies of fusion have in common: match folders, merge them, score the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import onebasin
from onebasin.data import Task, evaluate, load_model, load_task
from onebasin.data.files import split_off
from onebasin.engine import Tell
from onebasin.jobs.layers import best_layers
from onebasin.models import Folder

from .config import Config, Corpus, Matching

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Matched:
    """folders: all models in one frame, the anchor first. before, after: distances to it. seconds: of matching."""

    folders: list[str]
    before: list[float]
    after: list[float]
    seconds: float


@contextmanager
def matched(
    models: Sequence[str], matching: Matching, verify: bool = False, tell: Tell | None = None
) -> Iterator[Matched]:
    """Match all models to the first; the folders exist for the duration of the block. verify: as part of matching."""
    if matching is None:
        gaps = [onebasin.distance(model, models[0]).distance for model in models[1:]]
        yield Matched(list(models), gaps, gaps, 0.0)
        return
    with TemporaryDirectory() as temporary:
        folders, before, after, seconds = [models[0]], [], [], 0.0
        for number, model in enumerate(models[1:], 1):
            out = Path(temporary) / str(number)
            found = onebasin.match(model, models[0], out, verify=verify, tell=tell, **matching)
            # A level that moves the residual stream rewrites the anchor in canonical form, the same for every source.
            folders[0] = found.get("anchor_output", models[0])
            folders.append(found["output"])
            before.append(found["distance_before"])
            after.append(found["distance_after"])
            seconds += found["seconds"]
        yield Matched(folders, before, after, seconds)


def merged(
    folders: Sequence[str], how: Mapping[str, Any], config: Config, corpora: Sequence[Corpus]
) -> PreTrainedModel:
    """Merge matched folders by `how`, one of the study's `methods`, with the corpora's calibration files as data."""
    data = [split_off(corpus.calibration)[0] for corpus in corpora if corpus.calibration]
    options: dict[str, Any] = {"data": data[0] if len(data) == 1 else data} if data else {}
    found = onebasin.merge(
        list(folders), match="none", anchor=0, verify=False, verdict=False, samples=config.samples, task=config.task,
        **how, **options, **{key: value for key, value in config.options.items() if key in ("context", "vocabulary")},
    )  # fmt: skip
    model: PreTrainedModel = found["model"]
    return model


def score(model: PreTrainedModel, task: Task, config: Config) -> float:
    """Return the study's metric: accuracy, loss, or another one of the task."""
    found: float = getattr(evaluate(model, task), config.metric.replace("-", "_"))
    return found


def under_head_of(folder: str, body: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Return the merged body with the head of `folder`: "the classifier module is directly copied from the model
    fine-tuned on the corresponding downstream task" (Zhang et al., 2025, section 5.1)."""
    model = load_model(folder, config.task)
    model.base_model.load_state_dict(body.base_model.state_dict())
    return model


def test_of(corpus: Corpus, model: str, config: Config) -> Task:
    """Return the test data of a corpus, for `model`."""
    return _task(corpus.test, model, config)


def validation_of(corpus: Corpus, model: str, config: Config) -> Task:
    """Return the validation data of a corpus, for `model`. Raises ValueError if it has none."""
    if corpus.validation is None:
        raise ValueError(f"corpus '{corpus.name}' has no validation data, which layers: auto needs")
    return _task(corpus.validation, model, config)


def pairs(config: Config) -> list[tuple[int, int]]:
    """Return all pairs of models, counted from 0."""
    return list(combinations(range(len(config.models)), 2))


def fused(
    config: Config, run: Sequence[str], members: Sequence[int], matching: Matching, beyond: Corpus | None = None
) -> dict[str, list[float]]:
    """Return method -> the scores of the merged members on each member's corpus, and finally on `beyond`, if given.

    `layers: auto` chooses, per method, the layers that score best on validation data, see `onebasin.jobs.layers`.
    """
    models, corpora = [run[i] for i in members], [config.corpus(i) for i in members]

    def scores(
        place: Matched, how: Mapping[str, Any], of: Callable[[Corpus, str, Config], Task], beyond: Corpus | None = None
    ) -> list[float]:
        body = merged(place.folders, how, config, corpora)
        last = [] if beyond is None else [score(body, of(beyond, models[0], config), config)]
        if len(config.corpora) == 1:  # one head and one corpus: one score, which is each member's
            return [score(body, of(corpora[0], models[0], config), config)] * len(models) + last
        bodies = (under_head_of(folder, body, config) for folder in place.folders)
        return [score(body, of(corpus, model, config), config)
                for body, corpus, model in zip(bodies, corpora, models, strict=True)] + last  # fmt: skip

    found: dict[str, list[float]] = {}
    with ExitStack() as stack:

        @cache
        def at(layers: tuple[int, ...] | None) -> Matched:
            one = matching if layers is None else {**(matching or {}), "layers": list(layers)}
            return stack.enter_context(matched(models, one))

        for name, how in config.methods.items():
            chosen = None
            if matching is not None and matching.get("layers") == "auto":

                def measure(layers: list[int], how: Mapping[str, Any] = how) -> float:
                    return sum(scores(at(tuple(layers)), how, validation_of))

                chosen = tuple(best_layers(layers_of(models[0]), measure, config.metric)[0])
            found[name] = scores(at(chosen), how, test_of, beyond)
    return found


def layers_of(model: str) -> list[int]:
    """Return the numbers of a model's layers."""
    with closing(Folder(model)) as checkpoint:
        return checkpoint.signature.layers


def _task(data: str, model: str, config: Config) -> Task:
    name, split = split_off(data)
    return _loaded(config.task, name, model, split, config.limit, tuple(sorted(config.options.items())))


@cache
def _loaded(task: str, data: str, model: str, split: str | None, limit: int | None, options: Any) -> Task:
    """Read and tokenise examples once, for many settings that are scored on them."""
    return load_task(task, data, model, split=split, limit=limit, **dict(options))
