# SPDX-License-Identifier: Apache-2.0
"""The candidates of a search: closed forms, learned matching, and distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from onebasin.data.calibration import recut
from onebasin.data.teaching import divergence, example_losses
from onebasin.engine import MOST_STEPS
from onebasin.fusion.average import Average
from onebasin.fusion.method import Method, Sources
from onebasin.fusion.progressive import AVERAGE, FITTED, ProgressiveMerge, merge_progressively
from onebasin.fusion.refine import Refining, refine
from onebasin.fusion.tensors import averaged
from onebasin.jobs.aligning import Aligned, align_all
from onebasin.models import Held, ModelError
from onebasin.running.trace import Batch, examples_in

from .chosen import Candidate, Earlier, way_of
from .setup import EVEN, LEVEL, Setup

LEARNED_LEVEL = "invertible"
LEARNED_LR = 0.02  # measured: docs/results/plain-command.md
DISTILLED, TOKENS = 32, 2048  # examples per step of distillation, and tokens, if texts are longer
ROUNDS = 20  # epochs of distillation without a budget
UNMATCHED, LEARNED = "unmatched", "learned from "  # a candidate's name begins with its way of matching ...
DISTILLING = "distilled"  # ... and ends with this if it is distilled


def closed_form(setup: Setup, way: str) -> Candidate:
    """Return the best closed form after one way of matching."""
    return closed(setup, way, matched(setup, way))


def matched(setup: Setup, way: str) -> Aligned:
    """Return the models matched by weights or activations, with even norms if the name says so; or as they are."""
    if way == UNMATCHED:
        return align(setup, "none", way)
    return align(setup, LEVEL, way, match_with=way.removesuffix(EVEN))


def resumed(setup: Setup, earlier: Earlier) -> Candidate:
    """Return the result of an earlier search as a candidate, with the models aligned as they were for it."""
    way = way_of(earlier.chosen).removeprefix(LEARNED)
    entries = setup.frame_of(way).models[setup.template].signature.tensors.items()
    tensors = {
        role: earlier.model.read(role, setup.opt.dtype, setup.opt.device) for role, entry in entries if entry.stored
    }
    return candidate(setup, earlier.chosen, matched(setup, way), earlier.method, tensors)


def learned(setup: Setup, start: str, seconds: float) -> Candidate:
    """Return the average after learned matching, or the progressive merge.

    The loss compares logits: models are so sure of images that they imagined that the KL divergence is almost flat.
    """
    how = dict(seconds=seconds, mixed=setup.mixed, loss="logits", lr=LEARNED_LR)
    aligned = align(setup, LEARNED_LEVEL, start, match_with="learned", start=start.removesuffix(EVEN), **how)
    return closed(setup, f"{LEARNED}{start}", aligned)


def distilled(setup: Setup, best: Candidate, seconds: float) -> Candidate:
    """Return the best candidate so far after some steps of distillation."""
    (fit, held), tell = setup.split, setup.tell
    batches = shortened(recut([*fit, *setup.spare(seconds)], DISTILLED, by_length=True))
    steps = MOST_STEPS if setup.budget is not None else ROUNDS * len(batches)
    how = Refining(weights=[*setup.shares], seed=setup.opt.seed, steps=steps, mixed=setup.mixed,
                   seconds=min(seconds, setup.left))  # fmt: skip
    found = refine(
        Held(best.frame.models[setup.template], best.tensors), setup.stock, batches, how, setup.opt, held_out=held,
        progress=tell and (lambda text, loss: tell(f"distilling: {text}, loss {loss:.4g}")),
    )  # fmt: skip
    again = " again" if best.name.endswith(DISTILLING) else f", {DISTILLING}"
    facts = dict(best.facts, distilled=found.step)
    return candidate(setup, f"{best.name}{again}", best.aligned, best.method, found.tensors, **facts)


def selected(setup: Setup, way: str) -> Candidate:
    """Return the progressive merge of the best units of the models, matched by weights."""
    return fitted(setup, way, matched(setup, way), select=True)


def closed(setup: Setup, way: str, aligned: Aligned) -> Candidate:
    """Return the average of aligned models, or their progressive merge if that is better and can be made."""
    if not setup.blind:
        with suppress(ModelError):  # its layers cannot be followed
            return fitted(setup, way, aligned)
    mean = averaged(sources(setup, aligned), setup.opt)
    tensors = {role: mean(role) for role in aligned.models[setup.template].signature.tensors}
    return candidate(setup, f"{way}, {AVERAGE}", aligned, Average(), tensors)


def fitted(setup: Setup, way: str, aligned: Aligned, **switches: bool) -> Candidate:
    """Return the progressive merge of aligned models, or their average if that is better."""
    method = ProgressiveMerge(bags=setup.bags, **switches)
    how = replace(method, settle=False)
    found = merge_progressively(sources(setup, aligned), *setup.split, how, setup.opt, setup.tell)
    facts = {"ridges": found.ridges, "held_out_losses": found.losses}
    name = ", ".join([way, FITTED, *switches] if found.fitted else [way, AVERAGE])
    return candidate(setup, name, aligned, method if found.fitted else Average(), found.tensors, **facts)


def align(setup: Setup, level: str, way: str, **how: Any) -> Aligned:
    models = setup.frame_of(way).models
    how["symmetry"] = setup.opt.symmetry if level == "none" else level
    return align_all(models, setup.centre, level, replace(setup.matching, **how), setup.tell, *setup.split)


def sources(setup: Setup, aligned: Aligned) -> Sources:
    return Sources(aligned.models, setup.shares, setup.centre, setup.template)


def candidate(
    setup: Setup, name: str, aligned: Aligned, method: Method, tensors: Mapping[str, Tensor], **facts: Any
) -> Candidate:
    """Return a merged model with its losses on the data to choose by."""
    parts = [share / sum(setup.shares) for share in setup.shares]
    one = Candidate(name, setup.frame_of(way_of(name)), aligned, method, tensors, torch.empty(0), facts)
    return replace(one, losses=example_losses(divergence, setup.run(one), setup.answers, parts, setup.split[1]))


def shortened(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches with fewer examples of long texts, so that each has at most `TOKENS`, or one example."""
    found = list[Batch]()
    for batch in batches:
        count, length = examples_in(batch), batch["input_ids"].shape[-1] if "input_ids" in batch else 1
        found += recut([batch], ceil(count / ceil(count * length / TOKENS)))
    return found
