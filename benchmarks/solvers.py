# SPDX-License-Identifier: Apache-2.0
"""Assignment solvers on the scores that matching makes: `python -m benchmarks.solvers` prints JSON,
which goes to build/bench, too.

Processor seconds of one thread: ours as it is used, the sparse solver with its proof (shift included), SciPy without a
shift, and lapx (`pip install lapx`) where it is installed. Raises where two solvers find different totals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from onebasin.engine import peak_memory
from onebasin.symmetry.groups.assignment import _column_shift, assignment
from onebasin.symmetry.groups.sparse_lap import assign_certified

from .floor import timed
from .report import OUTPUT


def score(kind: str, n: int) -> Tensor:
    """Cross-moments (n, n) of n neurons with n / 2 weights each."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, n // 2, generator=generator) for _ in range(2))
    if kind == "independent":
        return a @ b.T
    if kind == "uneven":  # norms that differ, and a shared mean
        norms = torch.randn(2, n, 1, generator=generator).exp()
        return (a * norms[0] + 0.3) @ (b * norms[1] + 0.3).T
    return a @ (a + float(kind) * b)[torch.randperm(n, generator=generator)].T  # one base, this much noise


def sparse(matrix: Tensor) -> Tensor | None:
    """The sparse solver after the column shift."""
    spread = float(matrix.std())
    return assign_certified(matrix, _column_shift(matrix, spread), spread)


def main(
    sizes: Annotated[str, typer.Option(help="numbers of neurons")] = "1024,2048,4096",
    kinds: Annotated[str, typer.Option(help="independent, uneven, or noise around a base")] = "independent,uneven,6",
    only: Annotated[str, typer.Option(help="one solver: ours, sparse, scipy, lapx; its peak memory is then told")] = "",
) -> None:
    """Seconds of every solver on every kind of score."""
    torch.set_num_threads(1)
    results = []
    for n in map(int, sizes.split(",")):
        for kind in kinds.split(","):
            matrix = score(kind, n)
            solvers: dict[str, Callable[[], object]] = {
                "ours": lambda: assignment(matrix),  # noqa: B023
                "sparse": lambda: sparse(matrix),  # noqa: B023
                "scipy": lambda: linear_sum_assignment(matrix.double().neg().numpy())[1],  # noqa: B023
            }
            if find_spec("lap"):
                import lap

                solvers["lapx"] = lambda: lap.lapjv(matrix.double().neg().numpy())[1]  # noqa: B023
            seconds, totals, growth = {}, [], {}
            for name in [only] if only else solvers:
                solver, held = solvers[name], renewed()
                seconds[name], columns = timed(solver, time.process_time)
                growth = {"peak": peak_memory() - held} if only else {}
                if columns is None:  # too many entries for the sparse solver
                    seconds[name] = None
                else:
                    picked = matrix[torch.arange(n), torch.as_tensor(columns).long()].double()
                    totals.append(float(picked.sum()))
            if max(totals) - min(totals) > 1e-9 * abs(totals[0]):
                raise RuntimeError(f"{kind}, {n}: the solvers find {totals}")
            results.append({"score": kind, "n": n, "seconds": seconds, **growth})
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.with_name("solvers.json").write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    print(json.dumps(results, indent=2))


def renewed() -> int:
    """The resident set in bytes, from which its peak is counted anew (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return peak_memory()


if __name__ == "__main__":
    typer.run(main)
