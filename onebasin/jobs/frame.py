# SPDX-License-Identifier: Apache-2.0
"""Bringing models into one frame: canonical form, one width, an anchor, their alignments to it, and the proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onebasin.fusion import nearest_to_mean
from onebasin.models import Checkpoint, Widened
from onebasin.symmetry import Alignment

from .aligning import Found, align_all
from .folders import Common, common_roles, gauge, numel, widened
from .options import Options, Tell, verification
from .writing import refuse_unverifiable, verified

Align = Callable[[Sequence[Checkpoint], int], tuple[list[Found], list[Alignment]]]


@dataclass(frozen=True)
class Frame:
    """models: in the form and width in which they were aligned to `models[centre]`. common: the tensors of all.

    given: the models as they were. alignments: of every model; found: of the others. how: they are verified.
    """

    given: list[Checkpoint]
    models: list[Checkpoint]
    centre: int
    common: Common
    found: list[Found]
    alignments: list[Alignment]
    how: str

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.models)) if i != self.centre]

    def differences(self, opt: Options, tell: Tell | None) -> list[float | None]:
        """The largest of an output of every other model from the given one's (None: it was not run); see `verified`."""
        return [verified(self.given[i], self.models[i], self.alignments[i], opt, tell, self.how) for i in self.others]


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
    the anchor (default: `align_all`). verify: how the frame's models shall be. Raises CheckpointError for models that
    cannot be paired, or not be verified so.
    """
    matching = level != "none"
    how = verification(verify) if matching else "none"
    for checkpoint in given if how == "outputs" else []:
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
    return Frame(list(given), models, centre, common, found, alignments, how)
