# SPDX-License-Identifier: Apache-2.0
"""onebasin statistics: what Fisher merging and RegMean measure of a model, kept in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.data.calibration import Data
from onebasin.fusion.fisher import Fisher
from onebasin.fusion.regmean import RegMean
from onebasin.fusion.statistics import StatisticsMethod
from onebasin.models import Canonical, Model
from onebasin.models.outputs import Output
from onebasin.models.weight_files import clearly
from onebasin.settings import refuse_choice, refuses_unknown, take

from .folders import opened, refuse_places, together
from .options import ModelSource, Options, Tell

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import StatisticsKeywords

KINDS: dict[str, type[StatisticsMethod]] = {method.kind: method for method in (Fisher, RegMean)}


@refuses_unknown(Options, more=lambda: ("labels", "draws"))
def statistics(
    model: ModelSource,
    output: str | Path,
    kind: str = "fisher",
    *,
    canonical: bool = False,
    overwrite: bool = False,
    tell: Tell | None = None,
    **options: Unpack[StatisticsKeywords],
) -> dict[str, Any]:
    """Measure statistics of a model on data, and write them to a file.

    Args:
        model: the model to measure.
        output: the file to write.
        kind: `fisher`, the diagonal of the Fisher information of every tensor, or `gram`, the second moments of the
            inputs of every linear layer.
        canonical: whether to measure the model's canonical form, which levels that move the residual stream merge.
        overwrite: whether to replace the output where it exists.
        tell: called with a sentence at every step.
        options: the fields of `Options` (data, samples, task, device, seed, ...), and `labels` and `draws` of `Fisher`.

    Returns:
        `output`, `kind`, `samples`, `tensors` and `notes`.

    Raises:
        ValueError: in one sentence, for data or settings that do not fit the model.
    """
    refuse_choice("kind of statistics", kind, KINDS)
    rest: dict[str, Any] = {**options}
    fisher = take(Fisher, rest)
    method, opt = fisher if kind == Fisher.kind else KINDS[kind](), Options.of(rest)
    with opened([model], opt.family) as (checkpoint,), together(opt) as placing:
        refuse_places([Output("the output", output, "")], [checkpoint], overwrite, opt)
        form: Model = Canonical(checkpoint, opt.dtype) if canonical else checkpoint
        found = method.measure(form, Data([form], opt, opt, tell, method.given_labels()), opt, tell)
        with clearly(Path(output), "the statistics"):
            found.save(placing.file(Path(output), overwrite))
        notes = list(form.notes)
    return {
        "output": str(output),
        "kind": kind,
        "samples": found.samples,
        "tensors": len(found.tensors),
        "notes": notes,
    }
