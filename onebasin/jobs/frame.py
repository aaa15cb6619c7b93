# SPDX-License-Identifier: Apache-2.0
"""Bringing models into one frame: canonical form, one width, an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onebasin.fusion.average import nearest_to_mean
from onebasin.models import Canonical, Common, Model, Rewritten, Widened, common_roles, numel
from onebasin.symmetry import Alignment

from .folders import gauge, widened
from .options import Options, Tell, verification
from .writing import refuse_unverifiable, verified


@dataclass(frozen=True)
class Frame:
    """Models in one form and width, to be aligned to `models[centre]`.

    given: the models as they were. common: the tensors that all of them have. how: how rewritten models are verified.
    """

    given: list[Model]
    models: list[Model]
    centre: int
    common: Common
    how: str

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.models)) if i != self.centre]

    def differences(
        self, aligned: Sequence[Rewritten[Alignment]], opt: Options, tell: Tell | None
    ) -> list[float | None]:
        """Return, for every aligned model but the anchor, the largest difference of its outputs from the given model's;
        see `verified`."""
        return [verified(self.given[i].origin, aligned[i], opt, tell, self.how)[1] for i in self.others]


def in_one_frame(
    given: Sequence[Model],
    anchor: int | None,
    level: str,
    opt: Options,
    tell: Tell | None,
    *,
    shares: Sequence[float] | None = None,
    verify: bool | str = "outputs",
) -> Frame:
    """Bring models into a form in which they can be aligned to one of them.

    anchor: its number; None takes the widest where widths differ, else the model nearest to the mean with the weights
    `shares`. level: of symmetry; with `none` the models stay as they are. verify: how rewritten models are verified.
    Raises ModelError for models that cannot be paired, or cannot be verified that way.
    """
    matching = level != "none"
    how = verification(verify)
    for model in given:
        refuse_unverifiable(model.origin, how, matching)
    models: list[Model] = [gauge(model, opt, tell) if matching else model for model in given]
    widest = max(range(len(models)), key=lambda i: numel(models[i]))
    models = [widened(model, models[widest if anchor is None else anchor]) for model in models]
    common = common_roles(models)
    if anchor is not None:
        centre = anchor
    elif any(isinstance(model, Widened) for model in models):
        centre = widest
    else:
        centre = nearest_to_mean(models, common.roles, shares or [1 / len(models)] * len(models))
    return Frame(list(given), models, centre, common, how if matching else "none")


def with_even_norms(frame: Frame, opt: Options) -> Frame | None:
    """Return the same models with even norms; None where that gives no stream more freedom, or widths differ."""
    if not all(isinstance(model, Canonical) and not isinstance(model, Widened) for model in frame.models):
        return None
    models = [Canonical(model, opt.dtype, even=True) for model in frame.given]
    if not all(model.even for model in models):
        return None
    return replace(frame, models=list(models), common=common_roles(models))
