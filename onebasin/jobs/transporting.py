# SPDX-License-Identifier: Apache-2.0
"""Carrying models among the neurons of one of them, for the method `ot`."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.fusion.couplings import transport
from onebasin.fusion.transport import Transported
from onebasin.models import Model

from .aligning import calibration
from .options import Fusion, Options, Tell


def transported(models: Sequence[Model], centre: int, how: Fusion, opt: Options, tell: Tell | None) -> list[Model]:
    """Every model in the shapes and among the neurons of `models[centre]`, which stays."""
    batches = calibration([models[centre]], opt, tell) if how.ground == "acts" else []
    found: list[Model] = []
    for model in models:
        if model is models[centre]:
            found.append(model)
            continue
        moved = transport(
            model, models[centre], ground=how.ground, entropy=how.entropy, residual=how.residual,
            batches=batches, dtype=opt.dtype, device=opt.device, tell=tell,
        )  # fmt: skip
        found.append(Transported(model, moved, models[centre]))
    return found


def of_one_width(models: Sequence[Model]) -> bool:
    """Whether all spaces but positions and classes have one size in all models."""
    return all(
        space.kind in ("rows", "labels") or space.size == model.signature.sizes.get(key, space.size)
        for model in models[1:]
        for key, space in models[0].signature.spaces.items()
    )
