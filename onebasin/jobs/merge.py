# SPDX-License-Identifier: Apache-2.0
"""onebasin merge: match every model to an anchor, then merge them into one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.data.calibration import Data
from onebasin.engine import peak_memory
from onebasin.fusion import METHODS, loadable, method_of, name_of
from onebasin.fusion.average import Average
from onebasin.fusion.method import Method, Sources
from onebasin.matching.learned import Learning
from onebasin.matching.weights import Weights
from onebasin.models import Model, Rewritten, Target, numel, of_one_width, write_into
from onebasin.models.kinship import APART, Kinship, kinship
from onebasin.models.outputs import Output, model_folder
from onebasin.models.weight_files import clearly
from onebasin.running.trace import Batch
from onebasin.settings import (
    OutputSettings,
    Temperature,
    checked,
    choose_from,
    duration,
    refuse_choice,
    refuse_left,
    refuses_unknown,
    take,
)
from onebasin.symmetry import LEVELS
from onebasin.symmetry.coupling import Softened

from .aligning import Aligned, align_all, softened
from .apply import alignments_of
from .folders import one_vocabulary, opened, refuse_one, refuse_places, together, unit_folder, workplace
from .frame import Frame, in_one_frame
from .options import (
    LEVEL_NAMES,
    Matching,
    ModelSource,
    Options,
    Tell,
    least_agreement,
    level_named,
    refuse_even,
    refuse_out_of_range,
    shares_of,
    stored_dtype,
)
from .report import place_of, report_on
from .results import MergeResult
from .search import LEVEL, QUALITIES, Chosen, Earlier, Setup, choose, judged_on, too_large
from .verdict import verdict_on
from .writing import Record, hashed, ready_to_run, refuse_incomplete

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import MergeKeywords


def known_settings() -> list[str]:
    """Return the names of all methods' settings, and those of the level."""
    return [*LEVEL_NAMES, *(name for kind in loadable().values() for name in kind.names())]


@refuses_unknown(Options, OutputSettings, more=known_settings)
def merge(
    models: Sequence[ModelSource],
    output: str | Path | None = None,
    *,
    method: str | Method | None = None,
    budget: str | float | None = None,
    quality: str | None = None,
    weights: Sequence[float] | None = None,
    match: str | None = None,
    anchor: int | str = "auto",
    heads_from: int | None = None,
    soft: float | None = None,
    tokenizer_source: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | str = "outputs",
    verdict: bool = True,
    require: float | None = None,
    report: bool = False,
    tell: Tell | None = None,
    command: str | None = None,
    **settings: Unpack[MergeKeywords],
) -> MergeResult:
    """Merge models into one, and judge whether the result predicts what they do.

    If nothing says how to merge, the weights decide: models with a common base are averaged as they are; models that
    were trained apart are merged in the best of several ways, see `onebasin.jobs.search`.

    Args:
        models: two or more.
        output: the folder to write. None writes nothing: the result holds the merged `model`.
        method: one of `onebasin.METHODS`, or one with its settings, such as `RegMean(shrink=0.5)`.
        budget: how long to search for the best way, such as "5m" or seconds: closed forms first, then distilling or, on
            images that the models imagine, learning the matching (default: up to five minutes).
        quality: a name for a budget: fast (30 s), balanced (5 m) or best (30 m).
        weights: one per model (default: equal); they are used as given.
        match: "none" or a level of symmetry; `symmetry` and `level` are other names for it (default, where a method or
            a setting of matching is given: paper).
        anchor: the model that stays as it is, counted from 0, or "auto": the one nearest to the mean of all.
        heads_from: the model whose task head, labels and configuration the result takes (default: the anchor).
        soft: temperature of a coupling that mixes FFN neurons after matching (semi-permutations). The mixed models no
            longer compute the same functions.
        tokenizer_source: for models with different vocabularies: union, base (the anchor's; the first model's where the
            anchor is auto) or one of the models.
        dtype: of the weights written (default: that of the model in `heads_from`).
        overwrite: whether to replace the output where it exists.
        verify: check that every matched model still computes its source's function, as in `match`.
        verdict: whether to compare the result's predictions with its sources', see `onebasin.jobs.verdict`.
        require: the least agreement with every source that counts as success; the result says so as `required`. It
            needs the verdict.
        report: whether to write a page about the merge beside the output, `OUTPUT-report.html`.
        tell: called with a sentence at every step.
        command: the command that the model card names.
        settings: the settings of the method, and the fields of `Options` and `OutputSettings`.

    Returns:
        The merged `model` and its `verdict`, and the `alignments`, `distance_before` and `distance_after` of every
        model but the anchor; also a dictionary of all facts, as `--json` prints them.

    Raises:
        ValueError: as `match`, and for a setting of another method.
    """
    started = time.perf_counter()
    stored = stored_dtype(dtype)
    left: dict[str, Any] = {**settings, "match": match}
    level_named(left, "match")
    match = left.pop("match")
    require = least_agreement(require, verdict)
    if isinstance(method, str) and method not in METHODS:
        near = choose_from(method, METHODS)
        theirs = "" if near.endswith("?") else ", or run one of mergekit's with onebasin.merge_config"
        raise ValueError(f"unknown method '{method}'; {near}{theirs}")
    way = method if isinstance(method, Method) else take(method_of(method or "average"), left)
    look = take(OutputSettings, left)
    opt = take(Options, left)
    refuse_other_settings(left, None if method is None else way)
    said = [*said_of_matching(opt), *(name for name, value in (("method", method), ("match", match), ("soft", soft),
            ("tokenizer_source", tokenizer_source)) if value is not None)]  # fmt: skip
    seconds = seconds_of(budget, quality, said)
    searches = seconds is not None or not said
    level = LEVEL if searches else match or "paper"
    refuse_even(opt, level)
    opt = replace(opt, symmetry="paper" if level == "none" else level)
    centre = None if anchor == "auto" else int(anchor)
    page = place_of(output, report)
    refuse_one(models)
    plan = Plan(way, searches, seconds, level, shares_of(weights, len(models)), centre, heads_from, soft)
    if tokenizer_source is not None and way.fitted:
        raise ValueError("--tokenizer-source: models of different vocabularies can be averaged, not fitted")
    if opt.permutations == "sinkhorn" and (soft is not None or way.fitted):
        raise ValueError(
            f"permutations 'sinkhorn' make models for averaging: leave out --soft and --method {plan.name}"
        )
    with ExitStack() as stack:
        folders = stack.enter_context(opened(models, opt.family))
        way.refuse(len(folders))
        target = stack.enter_context(workplace(output))
        outputs = [Output("the output", target if output is None else output)]
        outputs += [Output("the report", page, "")] if page else []
        earlier = Earlier.of(output, opt.family) if output is not None and opt.resume and seconds else None
        replaces = refuse_places(outputs, [*folders, *way.files], overwrite or earlier is not None, opt)
        opt = stack.enter_context(unit_folder(output, opt))
        sha256 = stack.enter_context(hashed(folders))
        if earlier is not None and earlier.sha256 != sha256():
            raise ValueError(f"--resume: '{output}' was merged from other models; choose another output")
        given, unified = stack.enter_context(one_vocabulary(folders, tokenizer_source, centre or 0))
        kin = kinship(given, workers=opt.workers) if plan.searches or page else None
        if kin and plan.searches:
            plan = plan.for_kin(kin, opt)
        sized, plan = of_one_size(given, plan, opt, tell)
        frame = in_one_frame(sized, plan.anchor, plan.match, opt, tell, shares=plan.shares, verify=verify)
        stack.enter_context(ready_to_run(given if verdict or frame.how == "outputs" else []))
        data = Data(frame.models, opt, opt, tell, opt.labels)
        template = frame.centre if heads_from is None else heads_from
        if verdict or frame.how == "outputs":
            refuse_incomplete(sized[template].origin)  # what other models lack is copied from it
        if plan.searches and kin is not None:
            setup = Setup(frame, template, plan.shares, kin, opt, plan.budget, started, tell)
            chosen = choose(replace(setup, draws=report, earlier=earlier))
        else:
            chosen = aligned(frame, plan, opt, data)
        frame = chosen.frame
        mixed = softly(plan, frame, chosen.aligned, opt)
        sources = Sources(mixed if unified is None else unified.filled(mixed, opt.dtype), plan.shares, frame.centre,
                          template)  # fmt: skip
        merged = chosen.merged or chosen.method.merge(sources, data, opt, tell)
        told = {
            "output": None if output is None else str(output),
            **facts_of(plan, chosen, frame, kin),
            "notes": notes_of(plan, frame, chosen, template, kin),
        }

        if tell:
            tell("writing")
        with together(opt) as placing:
            folder = model_folder(placing, target, replaces(target))
            write_into(Target(folder, target, sources.models[template], stored), merged.tensors, look)
            differences = frame.differences(chosen.aligned.models, opt, tell)
            result: dict[str, Any] = {**told, **merged.facts, "max_output_difference": differences}
            if verdict:
                found = verdict_on(folder, given, partial(inputs_of, chosen, data, opt), chosen.judged_on, opt, tell)
                result = {**result, **found.facts(require), "notes": [*result["notes"], found.sentence]}
            record = Record("merge", command, folders, opt, result, chosen.aligned.found, sha256)
            record.write(folder, look.write_model_card)
            if page:
                with clearly(page, "the report"):
                    text = report_on(target.name, result, folders, frame, chosen.aligned.found)
                    placing.file(page, replaces(page)).write_text(text, "utf-8")
                result["report"] = str(page)
        made = MergeResult(result, alignments_of(models, frame, chosen.aligned.found, opt))
        if output is None:
            made.hold(target)
    made["seconds"], made["peak_memory"] = round(time.perf_counter() - started, 3), peak_memory()
    return made


@dataclass(frozen=True)
class Plan:
    """How to merge models. Raises ValueError for settings that exclude each other.

    searches: whether to search for the best way. budget: seconds of the search; None ends it after five minutes.
    anchor: None for auto. carried: whether the method has already brought the models to one width.
    """

    method: Method
    searches: bool
    budget: float | None
    match: str
    shares: list[float]
    anchor: int | None
    heads_from: int | None
    soft: float | None
    carried: bool = False

    def __post_init__(self) -> None:
        refuse_choice("match", self.match, ("none", *LEVELS))
        if len(self.shares) < 2:
            raise ValueError("merging needs at least two models")
        checked(Temperature | None, "soft", self.soft)
        if self.soft is not None and self.method.fitted:
            raise ValueError(f"--soft mixes models after they were measured: leave it out with --method {self.name}")
        refuse_out_of_range("heads-from", self.heads_from, len(self.shares))
        refuse_out_of_range("anchor", self.anchor, len(self.shares))

    @property
    def name(self) -> str:
        """The name of the method."""
        return name_of(type(self.method))

    def for_kin(self, kin: Kinship, opt: Options) -> Plan:
        """Return the plan for models of this kinship: those with a common base are not matched, and without data there
        is nothing to choose between."""
        if kin.kind == APART:
            return self
        return replace(self, match="none", searches=opt.data is not None or self.budget is not None)


def refuse_other_settings(left: Mapping[str, Any], method: Method | None) -> None:
    """Raise ValueError for keyword arguments that are left over, naming the methods that have such settings. method:
    None if the user names none."""
    for name in left:
        owners = [other for other, kind in loadable().items() if name in kind.names()]
        if owners:
            whose = f"{name} is a setting of {' and '.join(owners)}"
            if method is None:
                raise ValueError(f"{whose}; name the method, too: --method {owners[0]}")
            raise ValueError(f"{whose}, not of {name_of(type(method))}")
    refuse_left(left, *([] if method is None else [type(method)]), Options, OutputSettings)


def of_one_size(given: Sequence[Model], plan: Plan, opt: Options, tell: Tell | None) -> tuple[list[Model], Plan]:
    """Return the models and the plan; unmatched models of several widths are brought to one by a method that can."""
    if not plan.method.any_width or plan.match != "none" or of_one_width(given):
        return list(given), plan
    anchor = max(range(len(given)), key=lambda i: numel(given[i])) if plan.anchor is None else plan.anchor
    carried = plan.method.carry(given, anchor, Data(given, opt, opt, tell, opt.labels), opt, tell)
    return carried, replace(plan, anchor=anchor, carried=True)


def inputs_of(chosen: Chosen, data: Data, opt: Options) -> Sequence[Batch]:
    """Return the inputs to judge the result on; none where the models are too large to make any."""
    made = data.given.self_made
    return chosen.held or ([] if made and too_large(data.models, opt) else data.judged)


def said_of_matching(opt: Options) -> list[str]:
    """Return the settings of matching that differ from their defaults: they say how to merge."""
    usual = Options()
    names = [name for kind in (Matching, Weights, Learning) for name in kind.names() if name != "seed"]
    return [name for name in names if getattr(opt, name) != getattr(usual, name)]


def seconds_of(budget: str | float | None, quality: str | None, said: Sequence[str]) -> float | None:
    """Return the seconds of a budget or quality, or None. Raises ValueError where `said` names a setting that a search
    chooses."""
    if quality is not None:
        refuse_choice("quality", quality, QUALITIES)
    if quality is not None and budget is not None:
        raise ValueError("quality is a name for a budget; leave one of the two out")
    if budget is None and quality is None:
        return None
    if said:
        raise ValueError(f"a budget chooses {said[0].replace('_', '-')} by itself; leave one of the two out")
    return duration(QUALITIES[quality] if quality is not None else budget or "")


def aligned(frame: Frame, plan: Plan, opt: Options, data: Data) -> Chosen:
    """Return the models of a frame, aligned as planned."""
    if plan.method.needs_data:
        data.refuse_none()
    batches, held = data.split if plan.match != "none" and opt.measures else (None, None)
    found = align_all(frame.models, frame.centre, plan.match, opt, data.tell, batches, held)
    method = Average() if plan.carried else plan.method
    return Chosen(frame, found, method, judged_on=judged_on(opt, frame.models[0]))


def softly(plan: Plan, frame: Frame, aligned: Aligned, opt: Options) -> list[Model]:
    """Return the aligned models, mixed by soft couplings where these were asked for or learned."""
    models: list[Model] = list(aligned.models)
    for i, item in zip(frame.others, aligned.found, strict=True):
        if item.couplings:
            models[i] = Rewritten(frame.models[i], Softened(item.alignment, item.couplings), opt.dtype)
        if plan.soft is not None:
            soft = softened(aligned.models[i], frame.models[frame.centre], plan.soft, opt)
            models[i] = Rewritten(frame.models[i], soft, opt.dtype)
    return models


def facts_of(plan: Plan, chosen: Chosen, frame: Frame, kin: Kinship | None) -> dict[str, Any]:
    """Return the facts about the models and the merge that the result states."""
    found, method = chosen.aligned.found, chosen.method if plan.searches else plan.method
    return {
        "anchor": frame.centre,
        "method": name_of(type(method)),
        "match": chosen.aligned.level,
        "weights": plan.shares,
        "distance_before": [item.before.distance for item in found],
        "distance_after": [item.after.distance for item in found],
        "objective": found[0].objective,
        **({"settings": method.to_dict()} if method.to_dict() else {}),
        **({"kinship": asdict(kin)} if kin else {}),
        **({"search": chosen.report} if chosen.report else {}),
    }


def notes_of(plan: Plan, frame: Frame, chosen: Chosen, template: int, kin: Kinship | None) -> list[str]:
    """Return what the user should know about the result, each once."""
    notes = [
        *([f"the models: {kin.sentence}"] if kin else []),
        *frame.models[template].notes,
        *(note for item in chosen.aligned.found for note in item.notes),
    ]
    if frame.common.differing:
        notes.append(f"copied from model {template} ({frame.given[template].name}), since the models differ there: "
                     + ", ".join(frame.common.differing))  # fmt: skip
    if any(item.couplings for item in chosen.aligned.found):
        notes.append("relaxed permutations: the averaged models are no longer the same functions as their sources")
    if plan.soft is not None:
        notes.append("soft couplings: the mixed models are no longer the same functions as their sources")
    return list(dict.fromkeys([*notes, *chosen.notes]))
