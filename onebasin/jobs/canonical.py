# SPDX-License-Identifier: Apache-2.0
"""onebasin canonical: write a model in canonical form."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from onebasin.engine import peak_memory
from onebasin.models import Canonical
from onebasin.models.outputs import Output
from onebasin.settings import refuses_unknown

from .folders import opened, refuse_places, together
from .options import ModelSource, Options
from .writing import refuse_unverifiable, write_canonical


@refuses_unknown()
def canonical(
    model: ModelSource,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | str = "outputs",
    family: str | None = None,
    precision: str = "float32",
    even: bool = False,
) -> dict[str, Any]:
    """Write a model in canonical form: everything that its function does not depend on is fixed by rule.

    Args:
        model: the model.
        output: the folder to write.
        dtype: of the weights written (default: the model's).
        overwrite: whether to replace the output where it exists.
        verify: as in `match`.
        family: its table, for a model type that has none.
        precision: type of the computation, float32 or float64.
        even: whether to make the weights of norms behind a sum even, as `match` does; that changes the function.

    Returns:
        `output`, `max_output_difference`, `notes`, `seconds` and `peak_memory`.

    Raises:
        ValueError: as `match`.
    """
    started = time.perf_counter()
    opt = Options.of({"symmetry": "full", "family": family, "precision": precision})
    with opened([model], family) as given:
        refuse_places([Output("the output", output)], given, overwrite, opt)
        refuse_unverifiable(given[0], verify)
        form = Canonical(given[0], opt.dtype, even)
        with together(opt) as placing:
            difference = write_canonical(form, Path(output), overwrite, dtype, verify, placing)
    return {
        "output": str(output),
        "max_output_difference": difference,
        "notes": form.notes,
        "seconds": round(time.perf_counter() - started, 3),
        "peak_memory": peak_memory(),
    }
