# SPDX-License-Identifier: Apache-2.0
"""onebasin merge"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from onebasin.fusion import METHODS, loadable
from onebasin.jobs.search import QUALITIES

from . import common as c
from . import matching as m
from .fields import methods_options, typed

BESIDE_CONFIG = {"config", "output", "seed", "device", "precision", "family", "overwrite", "verify", "no_verify",
                 "workers", "json", "quiet", "verbose", "shard_size", "copy_tokenizer", "write_model_card",
                 "push_to_hub", "require", "no_verdict"}  # fmt: skip

MEANS = ("device", "precision", "family", "overwrite", "verify", "seed", "workers")
IN_WORDS = {*BESIDE_CONFIG - {"config"}, "models", "method", "base", "set_", "weights", "match", "dtype"}
OWN = ("base", "set_", "method", "budget", "quality", "require", "no_verdict", "report", "weights", "match", "anchor",
       "heads_from", "soft", "tokenizer_source", "layers", "validation", "metric", "config", "output", "push_to_hub",
       "json", "quiet", "verbose")  # fmt: skip


KINDS = loadable()


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Convert what was typed for the settings of all methods to the types of their fields."""
    there = {name: value for name, value in given.items() if value is not None}
    kinds = {name: kind for kind in KINDS.values() for name in kind.names()}
    return {name: typed(kinds[name], {name: value})[name] for name, value in there.items()}


@c.takes(methods_options(KINDS, [*OWN, *m.OPTIONS, *m.WRITTEN]), "settings", _settings)
@m.writes
@m.matches
def merge(
    context_: typer.Context,
    output: Annotated[str, typer.Option("--output", "-o", help="The folder to write.")],
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Two or more models: folders or hub ids.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A file in mergekit's schema, instead of MODEL... and how to merge them.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="How long to search for the best way, such as 30s, 5m or 2h: closed forms, then distilling, or "
            "learning on imagined images; Ctrl-C ends it early [default: up to 5m if the models were trained apart]."
        ),
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option(
            **c.choice(*QUALITIES),
            help=f"A name for a budget: {', '.join(f'{name} ({time})' for name, time in QUALITIES.items())}.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"How to merge: {', '.join(METHODS)}; or one of mergekit's, such as linear, slerp, ties, dare_ties "
            "[default: what the models need]."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model, for methods of mergekit that need one (ties, task_arithmetic).")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A parameter of a method of mergekit, such as density=0.5. Repeatable."
        ),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="One number per model, such as 0.5,0.5 [default: equal].")] = None,
    match: Annotated[
        str | None,
        c.level(f"Match first, at this level: none, {c.LEVELS} [default: what the models need].", "none"),
    ] = None,
    anchor: Annotated[
        str, typer.Option(help="The model that the others are matched to, from 0, or auto: nearest to the mean.")
    ] = "auto",
    heads_from: Annotated[
        int | None,
        typer.Option(help="Where task heads differ, the model to take them from, from 0 [default: the anchor]."),
    ] = None,
    soft: Annotated[
        float | None,
        typer.Option(help="Mix neurons and heads after matching, at this temperature (such as 0.1); inexact."),
    ] = None,
    tokenizer_source: Annotated[
        str | None,
        typer.Option(help="For models with different vocabularies: union, base (the anchor's), or one of the models."),
    ] = None,
    layers: m.BestLayers = None,
    validation: Annotated[
        str | None,
        typer.Option(help="layers auto: labelled data to choose by, NAME#SPLIT for one split of a dataset."),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="layers auto: loss, accuracy, macro-f1, or another metric of onebasin evaluate.")
    ] = "loss",
    require: Annotated[
        float | None,
        typer.Option(help="Exit with 1 if the result agrees with a source on less than this share of predictions."),
    ] = None,
    no_verdict: Annotated[
        bool, typer.Option("--no-verdict", help="Do not compare the result's predictions with its sources'.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Also write a page about the merge beside the output: OUTPUT-report.html.")
    ] = False,
    *,
    settings: dict[str, Any],
    matching: dict[str, Any],
    written: dict[str, Any],
    push_to_hub: c.Push = None,
    json: c.Json = False,
    quiet: c.Quiet = False,
    verbose: c.Verbose = 0,
) -> None:
    """Merge models into one, match them first where that helps, and report whether the result works.

    Examples: onebasin merge A B -o merged; onebasin merge A B -o merged --budget 10m --data texts.jsonl; onebasin merge
    A B -o merged --match full --method regmean --data texts.jsonl
    """
    import onebasin
    from onebasin.jobs.merge import seconds_of
    from onebasin.jobs.mergekit.merge_file import in_words, merge_in_words

    given = c.given_options(context_)
    ends = {"verdict": not no_verdict, "require": require, "command": c.command_line(), **written}
    means = {name: matching[name] for name in MEANS if name in matching}
    job: Callable[..., onebasin.MergeResult]
    for name in models or []:
        if config is None and name.endswith((".yml", ".yaml")):
            raise ValueError(f"'{name}' is no model; a file that says what is merged is given as --config {name}")
    if config is not None:
        _refuse_idle(given, BESIDE_CONFIG, "--config: the file says what is merged and how")
        if "shard_size" not in given:  # the file may say it
            ends.pop("shard_size")
        job = partial(onebasin.merge_config, config, output, **means, **ends)
        job = job if "seed" in given else partial(job, seed=None)
    elif method is not None and method not in KINDS:
        _refuse_idle(given, IN_WORDS, f"--method {method}, which runs in mergekit")
        words = in_words(models or [], method, base=base, weights=c.weights(weights), match=match,
                         dtype=matching["dtype"], parameters=c.scalars(set_, "--set"))  # fmt: skip
        job = partial(merge_in_words, words, output, **means, **ends)
    else:
        if base is not None or set_:
            raise ValueError("--base and --set are for methods of mergekit, such as --method ties")
        if anchor != "auto" and not anchor.isdigit():
            raise ValueError(f"--anchor '{anchor}': write auto or a number counted from 0")
        how = {"method": method, "budget": budget, "quality": quality, "weights": c.weights(weights), "match": match,
               "anchor": anchor, "heads_from": heads_from, "soft": soft, "tokenizer_source": tokenizer_source,
               "report": report, **settings, **matching, **ends}  # fmt: skip
        if layers == "auto":
            how |= {"validation": validation, "metric": metric}
            job = partial(onebasin.merge_best_layers, models or [], output, **how)
        else:
            job = partial(onebasin.merge, models or [], output, layers=c.numbers(layers, "--layers"), **how)
    with c.progress(quiet, verbose, seconds_of(budget, quality, ())) as tell:
        result = job(tell=tell)
        c.push(output, push_to_hub, result, tell)
    _print(result, result.get("models") or models or [], json, quiet)
    if result.get("required") is False:
        c.console.print(f"the result agrees with a source on less than {require} of predictions, as --require demands")
        raise typer.Exit(1)


def _refuse_idle(given: dict[str, str], known: Collection[str], of: str) -> None:
    for name, option in given.items():
        if name not in known:
            raise ValueError(f"{option} cannot be combined with {of}")


def _print_distances(result: dict[str, Any], models: Sequence[str], moved: bool) -> None:
    others = [name for i, name in enumerate(models) if i != result.get("anchor")]
    for name, before, after in zip(others, result["distance_before"], result["distance_after"], strict=False):
        and_then = f" -> {after:.6g}" if moved else ""
        print(f"{name}: distance to {models[result['anchor']]} {before:.6g}{and_then}")


def _print(result: dict[str, Any], models: Sequence[str], json: bool, quiet: bool) -> None:
    if c.wants_words(result, json, quiet):
        matched = f", matched at level {result['match']}" if result["match"] != "none" else ""
        if "search" in result:  # it compares predictions, so distances say little about it
            tried = len(result["search"]["candidates"])
            best = f", the best of {tried} ways to merge" if tried > 1 else " of"
            way = f"{result['search']['chosen']}{best} {len(models)} models"
        else:
            way = f"{result['method']} of {len(models)} models"
            _print_distances(result, models, bool(matched))
            matched = matched or ", not matched"
        print(f"{result['output']}: {way}{matched}")
        if "report" in result:
            print(f"{result['report']}: the report")
        c.print_effort(result)
