# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of Zhang et al. (2025), each as a function of a study's file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from onebasin.data import load_model
from onebasin.landscape import curve
from onebasin.landscape.plane import plane

from .config import Config, Corpus, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import fused, layers_of, matched, merged, pairs, score, test_of

T = TypeVar("T")
Members = tuple[int, int]  # of a run: the numbers of two models

METHODS: dict[str, Any] = {"average": {}, "fisher": {}, "regmean": {}}
PAPER: dict[str, Any] = {"symmetry": "paper", "rescale": "after"}
UNSCALED: dict[str, Any] = {"symmetry": "paper", "rescale": "none"}
FULL: dict[str, Any] = {"symmetry": "full", "rescale": "joint"}
FUSION: dict[str, Any] = {"no match": None, "paper, no rescaling": UNSCALED, "paper": PAPER, "full": FULL}
ABLATIONS: dict[str, Any] = {
    "no match": None,
    "w/o attention": {**PAPER, "parts": ["ffn"]},
    "w/o FFN": {**PAPER, "parts": ["attention"]},
    "w/o rescaling": UNSCALED,
    "match": PAPER,
}
LANDSCAPE = {name: how for name, how in ABLATIONS.items() if name != "w/o rescaling"}
# Two baselines as presets: Git Re-Basin's weight matching permutes every space; OT-Fusion's hard matching, as Figure 4
# applies it, only the neurons of FFNs.
DISTANCES: dict[str, Any] = {
    "no match": None,
    "Git Re-Basin": {"symmetry": "permutation", "rescale": "none"},
    "OT, hard": {**UNSCALED, "parts": ["ffn"]},
    "paper": UNSCALED,
    "paper, rescaled after": PAPER,
    "paper, joint": {"symmetry": "paper", "rescale": "joint"},
    "full": FULL,
    "invertible": {"symmetry": "invertible", "rescale": "joint"},
}
RUNTIME = {"paper": PAPER, "full": FULL}
LAYERS = {"attention": {**PAPER, "parts": ["attention"]}}


def of_pairs(config: Config, once: Once, what: str, measure: Callable[[list[str], Members], T]) -> list[list[T]]:
    """Measure all pairs of every run. what: see `Once`. measure: (run, members) -> result."""
    return [[once(what, [run[i] for i in members], partial(measure, run, members)) for members in pairs(config)]
            for run in config.runs()]  # fmt: skip


def flat(found: list[list[T]]) -> list[T]:
    return [one for some in found for one in some]


# --- scores of merged models --------------------------------------------------------------------------------------


def fusion_table(config: Config, once: Once) -> Results:
    """Tables 1 and 2: every method after every matching, and the scores of the end models.

    In-domain: every pair of models, scored on the corpus of each with its own head. Out of domain, if the study has
    such a corpus: all models merged, scored on data on which none was trained.
    """
    beyond = config.out_of_domain if len(config.models) == 2 else None  # the only pair is all models: merged once
    results = _grid(config, once, "fusion-table", "Fusion with and without matching", beyond)
    if config.out_of_domain is not None:
        results.tables.append(_out_of_domain(config, once, config.out_of_domain))
    return results


def ablation(config: Config, once: Once) -> Results:
    """Figure 3: matching without attention, without FFN, without rescaling."""
    return _grid(config, once, "ablation", "The effect of each part of matching")


def _grid(config: Config, once: Once, study: str, title: str, beyond: Corpus | None = None) -> Results:
    """Score every method (rows) after every matching (columns)."""
    runs, members = config.runs(), pairs(config)
    # matching -> method -> seed -> pair -> the scores on both corpora
    found: dict[str, dict[str, list[list[list[float]]]]] = {}
    for name, matching in config.matchings.items():
        scored = of_pairs(config, once, name, partial(fused, config, matching=matching, beyond=beyond))
        found[name] = {method: [[one[method][:2] for one in run] for run in scored] for method in config.methods}
    own = [
        [
            once("on its own", [model], partial(_score_of, config, model, config.corpus(i)))
            for i, model in enumerate(run)
        ]
        for run in runs
    ]
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
    def name(model: int) -> str:
        return config.corpus(model).name if len(config.corpora) > 1 else str(model)

    return [
        [f"{name(i)} + {name(j)}", method, *(spread([mean(seed[p]) for seed in of[method]]) for of in found.values())]
        for p, (i, j) in enumerate(pairs(config))
        for method in config.methods
    ]


def _score_of(config: Config, model: str, corpus: Corpus) -> float:
    return score(load_model(model, config.task), test_of(corpus, model, config), config)


def _all(config: Config, run: Sequence[str], matching: Matching, corpus: Corpus) -> dict[str, float]:
    """Return method -> score of a merge of three or more models. `auto`, which chooses layers for a pair, means all."""
    whole = None if matching is None else {key: value for key, value in matching.items() if value != "auto"}
    corpora = [config.corpus(i) for i in range(len(run))]
    with matched(run, whole) as at:
        return {name: score(merged(at.folders, how, config, corpora), test_of(corpus, run[0], config), config)
                for name, how in config.methods.items()}  # fmt: skip


def _out_of_domain(config: Config, once: Once, corpus: Corpus) -> Table:
    """Return the scores of all models merged, and of the end models, on data on which none was trained."""
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


def layers(config: Config, once: Once) -> Results:
    """Figure 6: score merged models of which only some layers were matched, for every matching of the study.

    Single: layer l alone. Tail: the last n. Head: the first n. Zero layers is no match.
    """
    tables, charts = [], []
    numbers = layers_of(config.runs()[0][0])
    subsets: dict[str, list[list[int]]] = {
        "single": [[layer] for layer in numbers],
        "tail": [numbers[len(numbers) - n :] for n in range(len(numbers) + 1)],
        "head": [numbers[:n] for n in range(len(numbers) + 1)],
    }
    for name, matching in config.matchings.items():
        found: dict[tuple[int, ...], dict[str, tuple[float, float]]] = {}
        for chosen in (chosen for each in subsets.values() for chosen in each):
            if tuple(chosen) not in found:  # one layer alone is also the first, or the last
                what = f"{name}: layers {', '.join(map(str, chosen)) or 'none'}"
                asked = {**(matching or {}), "layers": chosen} if chosen else None
                scored = of_pairs(config, once, what, partial(fused, config, matching=asked))
                found[tuple(chosen)] = {
                    method: spread([mean(mean(pair[method]) for pair in run) for run in scored])
                    for method in config.methods
                }
        for kind, each in subsets.items():
            at = numbers if kind == "single" else list(range(len(numbers) + 1))
            values = [found[tuple(chosen)] for chosen in each]
            first = "layer" if kind == "single" else "layers matched"
            rows = [[x, *(scores[method] for method in config.methods)] for x, scores in zip(at, values, strict=True)]
            tables.append(Table(f"{name}, {kind}: {config.metric}", [first, *config.methods], rows))
            series = {method: [scores[method][0] for scores in values] for method in config.methods}
            title = f"{name}: {kind} layers matched"
            charts.append(Chart(f"{name}-{kind}".replace(" ", "-"), title, "lines", at, series, first, config.metric))
    text = f"{len(config.runs())} seeds, {len(pairs(config))} pairs each, merged with equal weights."
    return Results("layers", "Which layers to match", text, config.model_dump(), tables, charts)


# --- distances, losses and seconds --------------------------------------------------------------------------------


def distances(config: Config, once: Once) -> Results:
    """Figure 4: the Euclidean distance over the shared parameters after each matching, also relative to that before it.

    Levels that rotate the residual stream measure both distances between canonical forms, so their distance before is
    different; compare them with the others by the ratio.
    """

    def gaps(run: list[str], members: Members, matching: Matching) -> tuple[float, float]:
        with matched([run[i] for i in members], matching) as found:
            return found.before[0], found.after[0]

    rows, shares = [], {}
    for name, matching in config.matchings.items():
        before, after = zip(*flat(of_pairs(config, once, name, partial(gaps, matching=matching))), strict=True)
        shares[name] = spread([b / a for a, b in zip(before, after, strict=True)])
        rows.append([name, spread(before), spread(after), shares[name]])
    count = len(config.runs()) * len(pairs(config))
    table = Table(f"Distance between the models, mean ± standard deviation over {count} pairs",
                  ["matching", "before", "after", "after / before"], rows)  # fmt: skip
    chart = Chart("share", "Distance after matching, as a share of the distance before", "bars", list(shares),
                  {"after / before": list(shares.values())}, ylabel="share")  # fmt: skip
    text = "Euclidean distance over all shared parameters. The functions of the models are the same in every row."
    return Results("distance", "Distance after matching", text, config.model_dump(), [table], [chart])


def landscape(config: Config, once: Once) -> Results:
    """Figures 2 and 5: the loss along the line and its barrier for every matching, over all seeds and pairs; over the
    plane through A, B and matched B of the first pair; and for three models over the plane through them, unmatched and
    matched to the first.

    Planes are for the last matching of the study. There is none of two models if it also rewrites their anchor.
    """

    def line(run: list[str], members: Members, matching: Matching) -> dict[str, Any]:
        i, j = members
        with matched([run[i], run[j]], matching) as found:
            task = test_of(config.corpus(i), run[i], config)
            return curve(found.folders[0], found.folders[1], task, config.points)

    curves = {name: flat(of_pairs(config, once, f"{name}, the line", partial(line, matching=matching)))
              for name, matching in config.matchings.items()}  # fmt: skip
    lambdas = next(iter(curves.values()))[0]["lambdas"]
    means = {name: [mean(at) for at in zip(*(one["losses"] for one in along), strict=True)]
             for name, along in curves.items()}  # fmt: skip
    rows = [[name, spread([one["barrier"] for one in along]), means[name][len(lambdas) // 2]]
            for name, along in curves.items()]  # fmt: skip
    count = len(config.runs()) * len(pairs(config))
    tables = [Table(f"Loss barrier, mean ± standard deviation over {count} pairs",
                    ["matching", "barrier", "mean loss at the middle"], rows)]  # fmt: skip
    ends, planes = "λ (0: anchor, 1: the other model)", _planes(config, once)
    charts = [Chart("line", "Mean loss along the line", "lines", lambdas, means, ends, "loss")]
    if planes:
        title = "Loss over the plane through three models"
        charts.append(Chart("planes", title, "contours", [], planes, "distance", "loss"))
    text = "The barrier is the largest excess of the loss over the straight line between the two end losses."
    return Results("landscape", "The loss between the models", text, config.model_dump(), tables, charts)


def _planes(config: Config, once: Once) -> dict[str, Any]:
    run = config.runs()[0]
    task = test_of(config.corpus(0), run[0], config)
    named = [name for name, matching in config.matchings.items() if matching is not None]
    panels: dict[str, Any] = {}

    def panel(title: str, models: Sequence[str], third: str = "C") -> None:
        a, b, c = models
        found = once(f"the plane: {title}", run[:3], lambda: plane(a, b, c, task, config.points))
        panels[title] = {**found, "marks": dict(zip(("A", "B", third), found["marks"].values(), strict=True))}

    if len(run) > 2:
        panel("three models, as they are", run[:3])
    for name in named[-1:]:
        with matched(run[:3], config.matchings[name]) as found:
            if found.folders[0] == run[0]:
                panel(f"A, B and matched B ({name})", [run[0], run[1], found.folders[1]], "matched B")
            if len(run) > 2:
                panel(f"three models, matched to A ({name})", found.folders)
    return panels


def runtime(config: Config, once: Once) -> Results:
    """Table 3: seconds per model for fine-tuning (from `training.json` beside the weights), per pair for matching and
    merging.

    The overhead is the ratio of the seconds of a matching to those of a merge, per method, without fine-tuning: the
    paper's claim is under 5 % of Fisher and RegMean. Merges are timed after the first of the matchings.
    """
    tuned = [float(json.loads(file.read_text("utf-8"))["seconds"]) for run in config.runs() for model in run
             if (file := Path(model) / "training.json").is_file()]  # fmt: skip

    def taken(run: list[str], members: Members, matching: Matching, merging: bool) -> dict[str, float]:
        with matched([run[i] for i in members], matching) as found:
            seconds = {"matching": found.seconds}
            for name, how in config.methods.items() if merging else ():
                started = time.perf_counter()
                merged(found.folders, how, config, [config.corpus(i) for i in members])
                seconds[name] = time.perf_counter() - started
        return seconds

    found = {
        name: flat(of_pairs(config, once, name, partial(taken, matching=matching, merging=number == 0)))
        for number, (name, matching) in enumerate(config.matchings.items())
    }
    matching = {name: [one["matching"] for one in each] for name, each in found.items()}
    merging = {method: [one[method] for one in next(iter(found.values()))] for method in config.methods}
    seconds = {"fine-tuning, per model": spread(tuned) if tuned else None,
               **{f"matching: {name}": spread(values) for name, values in matching.items()},
               **{f"merging: {method}": spread(values) for method, values in merging.items()}}  # fmt: skip
    rows = [[name, *(mean(values) / mean(of) for of in merging.values())] for name, values in matching.items()]
    tables = [
        Table(
            "Seconds, mean ± standard deviation over pairs", ["stage", "seconds"], [[*row] for row in seconds.items()]
        ),
        Table("Matching as a share of merging", ["matching", *merging], rows),
    ]
    measured = {stage: value for stage, value in seconds.items() if value is not None}
    chart = Chart("seconds", "Seconds per stage", "bars", list(measured), {"seconds": list(measured.values())},
                  ylabel="seconds")  # fmt: skip
    text = "Matching and merging read and write model folders; merging includes measuring on calibration data."
    return Results("runtime", "The cost of matching", text, config.model_dump(), tables, [chart])
