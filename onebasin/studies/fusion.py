# SPDX-License-Identifier: Apache-2.0
"""Studies whose rows are ways to merge and whose columns are ways to match: the fusion table and the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from onebasin.data import load_model

from .config import Config, Corpus, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import fused, merged, pairs, score, test_of
from .settings import matched as matched_to_first

MATCHINGS: dict[str, Any] = {
    "no match": None,
    "paper, no rescaling": {"symmetry": "paper", "rescale": "none"},
    "paper": {"symmetry": "paper", "rescale": "after"},
    "full": {"symmetry": "full", "rescale": "joint"},
}
METHODS: dict[str, Any] = {"average": {}, "fisher": {}, "regmean": {}}
ABLATIONS: dict[str, Any] = {
    "no match": None,
    "w/o attention": {"symmetry": "paper", "rescale": "after", "parts": ["ffn"]},
    "w/o FFN": {"symmetry": "paper", "rescale": "after", "parts": ["attention"]},
    "w/o rescaling": {"symmetry": "paper", "rescale": "none"},
    "match": {"symmetry": "paper", "rescale": "after"},
}


def fusion_table(config: Config, once: Once) -> Results:
    """Tables 1 and 2 of Zhang et al. (2025): every method after every matching, and the scores of the end models.

    In-domain: every pair of models, scored on the corpus of each with its own head. Out of domain, if the study has
    such a corpus: all models merged, scored on data on which none was trained.
    """
    beyond = config.out_of_domain if len(config.models) == 2 else None  # the only pair is all models: merged once
    results = _grid(config, once, "fusion-table", "Fusion with and without matching", beyond)
    if config.out_of_domain is not None:
        results.tables.append(_out_of_domain(config, once))
    return results


def ablation(config: Config, once: Once) -> Results:
    """Figure 3 of Zhang et al. (2025): matching without attention, without FFN, without rescaling."""
    return _grid(config, once, "ablation", "The effect of each part of matching")


def _grid(config: Config, once: Once, study: str, title: str, beyond: Corpus | None = None) -> Results:
    runs, members = config.runs(), pairs(config)
    # matching -> method -> seed -> pair -> the scores on both corpora
    found: dict[str, dict[str, list[list[list[float]]]]] = {}
    for name, matching in config.matchings.items():
        found[name] = {method: [] for method in config.methods}
        for run in runs:
            scored: list[dict[str, list[float]]] = []
            for pair in members:
                scored.append(once(name, [run[i] for i in pair], partial(fused, config, run, pair, matching, beyond)))
            for method in config.methods:
                found[name][method].append([one[method][:2] for one in scored])
    own = [[once("on its own", [model], partial(_own, config, run, i)) for i, model in enumerate(run)] for run in runs]
    cells = {name: {method: spread([mean(map(mean, seed)) for seed in seeds]) for method, seeds in of.items()}
             for name, of in found.items()}  # fmt: skip
    ends = spread([mean(scores) for scores in own])
    unit = f"{config.metric}, mean ± standard deviation over {len(runs)} seeds"
    tables = [
        Table(
            f"Mean over the pairs of every seed ({len(members)}): {unit}",
            ["method", *config.matchings],
            [[method, *(cells[name][method] for name in config.matchings)] for method in config.methods]
            + [["the end models, each on its own", *([ends] * len(config.matchings))]],
        ),
        Table(f"Every pair: {unit}", ["pair", "method", *config.matchings], _by_pair(config, found)),
    ]
    chart = Chart("scores", f"{title} ({config.task})", "bars", list(config.methods),
                  {name: [cells[name][method] for method in config.methods] for name in config.matchings},
                  ylabel=config.metric)  # fmt: skip
    text = (f"{len(config.models)} models, {len(runs)} seeds. Pairs are merged with equal weights and scored on the "
            f"test data of both, each with its own head. The end models alone score {ends[0]:.3f}.")  # fmt: skip
    return Results(study, title, text, config.model_dump(), tables, [chart])


def _by_pair(config: Config, found: Any) -> list[list[Any]]:
    rows = []
    for p, (i, j) in enumerate(pairs(config)):
        for method in config.methods:
            cells = [spread([mean(seed[p]) for seed in of[method]]) for of in found.values()]
            rows.append([f"{_name(config, i)} + {_name(config, j)}", method, *cells])
    return rows


def _name(config: Config, model: int) -> str:
    return config.corpus(model).name if len(config.corpora) > 1 else str(model)


def _own(config: Config, run: Sequence[str], model: int) -> float:
    return _score_of(config, run[model], config.corpus(model))


def _score_of(config: Config, model: str, corpus: Corpus) -> float:
    return score(load_model(model, config.task), test_of(corpus, model, config), config)


def _all(config: Config, run: Sequence[str], matching: Matching, corpus: Corpus) -> dict[str, float]:
    """Return method -> score of a merge of three or more models. `auto`, which chooses layers for a pair, means all."""
    whole = None if matching is None else {key: value for key, value in matching.items() if value != "auto"}
    corpora = [config.corpus(i) for i in range(len(run))]
    with matched_to_first(run, whole) as at:
        return {name: score(merged(at.folders, how, config, corpora), test_of(corpus, run[0], config), config)
                for name, how in config.methods.items()}  # fmt: skip


def _out_of_domain(config: Config, once: Once) -> Table:
    """Return the scores of all models merged, and of the end models, on data on which none was trained."""
    corpus = config.out_of_domain
    assert corpus is not None
    rows: dict[str, list[Any]] = {method: [] for method in config.methods}
    for name, matching in config.matchings.items():
        if len(config.models) == 2:
            pairs_scored = [once(name, run, partial(fused, config, run, (0, 1), matching, corpus))
                            for run in config.runs()]  # fmt: skip
            scored = [{method: scores[-1] for method, scores in one.items()} for one in pairs_scored]
        else:
            what = f"{name}, on {corpus.name}"
            scored = [once(what, run, partial(_all, config, run, matching, corpus)) for run in config.runs()]
        for method in config.methods:
            rows[method].append(spread([one[method] for one in scored]))
    ends = [mean(once(f"on {corpus.name}", [model], partial(_score_of, config, model, corpus)) for model in run)
            for run in config.runs()]  # fmt: skip
    return Table(
        f"All models merged, on {corpus.name}, on which none was trained: {config.metric}",
        ["method", *config.matchings],
        [[method, *cells] for method, cells in rows.items()]
        + [["the end models, mean", *([spread(ends)] * len(config.matchings))]],
    )
