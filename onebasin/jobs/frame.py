# SPDX-License-Identifier: Apache-2.0
"""Bringing models into one frame: canonical form, one width, an anchor, their alignments to it, and the proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onebasin.checkpoint import Checkpoint, Widened
from onebasin.fusion import nearest_to_mean
from onebasin.symmetry import Alignment

from .aligning import Found, align_all
from .folders import Common, common_roles, gauge, numel, widened
from .options import Options, Tell, verification
from .writing import refuse_unverifiable, verified

Align = Callable[[Sequence[Checkpoint], int], tuple[list[Found], list[Alignment]]]


@dataclass(frozen=True)
class Frame:
    """models: in the form and width in which they were aligned to `models[centre]`. common: the tensors of all.

    alignments: of every model; found and differences: of the others, where a difference is the largest of an output
    from the given model's (None: it was not run).
    """

    models: list[Checkpoint]
    centre: int
    common: Common
    found: list[Found]
    alignments: list[Alignment]
    differences: list[float | None]

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.models)) if i != self.centre]


def in_one_frame(
    given: Sequence[Checkpoint],
    anchor: int | None,
    level: str,
    opt: Options,
    tell: Tell | None,
    *,
    shares: Sequence[float] | None = None,
    verify: bool | str = "outputs",
    align: Align | None = None,
) -> Frame:
    """Align models to one of them.

    anchor: its number; None for the widest where widths differ, else the one nearest to the mean (weights: shares).
    level: of symmetry; with `none` the models stay as they are. align: how, given the models in their final form and
    the anchor (default: `align_all`). Raises CheckpointError for models that cannot be paired, and for one that would
    no longer compute its function; see `verified`.
    """
    matching = level != "none"
    for checkpoint in given if matching and verification(verify) == "outputs" else []:
        refuse_unverifiable(checkpoint)
    models = [gauge(checkpoint, opt, tell) if matching else checkpoint for checkpoint in given]
    widest = max(range(len(models)), key=lambda i: numel(models[i]))
    models = [widened(model, models[widest if anchor is None else anchor]) for model in models]
    common = common_roles(models)
    if anchor is not None:
        centre = anchor
    elif any(isinstance(model, Widened) for model in models):
        centre = widest
    else:
        centre = nearest_to_mean(models, common.roles, shares or [1 / len(models)] * len(models))
    found, alignments = align(models, centre) if align else align_all(models, centre, level, opt, tell)
    differences = [
        verified(given[i], models[i], alignments[i], opt, tell, verify) if matching else None
        for i in range(len(models))
        if i != centre
    ]
    return Frame(models, centre, common, found, alignments, differences)
