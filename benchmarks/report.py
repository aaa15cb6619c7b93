# SPDX-License-Identifier: Apache-2.0
"""The table on the screen and in docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUTPUT = Path("build/bench/results.json")
FACTOR = 0.5  # of the time of an SVD of 64 x 64 that the iteration for its polar factor takes
HEAD = ("row", "model", "layers", "ours", "plain", "floor", "faster", "over floor", "peak MB ours", "plain")


def cells(result: dict[str, Any]) -> list[str]:
    """One line of the table; a target that is missed is marked with *."""
    memory = result["peak_mb"]
    return [
        result["row"],
        f"{result['model']} ({result['kind']})",
        str(result["layers"]),
        f"{result['ours']:.3g} s",
        _or_dash(result["plain"], "{:.3g} s"),
        f"{result['floor']:.3g} s",
        _or_dash(result["faster"], "{:.2f}x", result["faster_target"], higher=True),
        _or_dash(result["over_floor"], "{:.2f}x", result["over_floor_target"], higher=False),
        _or_dash(memory.get("ours"), "{:.0f}"),
        _or_dash(memory.get("plain"), "{:.0f}"),
    ]


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(*HEAD, title="matching: seconds (median), * misses its target")
    for result in results:
        table.add_row(*cells(result))
    console.print(table)


TEXT = """# Performance

Made by `{command}`; edit nothing here by hand.

*ours*: finding the alignment and rewriting every tensor that it moves, both models in memory. *plain*: a transcription
of the rotation paper's Algorithm 1, Eq. 7 and Eq. 12 line by line (`benchmarks/transcription.py`): a loop over heads,
SciPy's assignment, dense permutation matrices; of Eq. 12's roots the one at which Eq. 11, evaluated as it stands, is
least, as the published code does. Both run in float32 with the same threads, taking turns; seconds are medians. For
joint rescaling *plain* rescales afterwards, as the paper does.

*floor*: the FLOPs of the cross-moments at the rate of this machine's fastest square GEMM, LAPACK's SVDs and the
assignments alone on the same matrices and as many cores, and both models read and the result written once at the
speed of a copy. The GEMMs that rotate the result are not in it.

*peak MB*: growth of the resident set in a process of its own, where every tensor is made when it is read and dropped
when it is written. A * marks a missed target.

{table}

What the floor consists of:

{parts}

Machine: {processor}, {threads} thread(s), GEMM {gemm:.1f} GFLOP/s, copy {copy:.1f} GB/s, load average {load:.1f}
before the first row, torch {torch}; {clock} seconds, median of {repeats}.

## How far attention can be from the transcription

Per layer of width d with heads of n dimensions, both must form the cross-moments of four matrices (8 d^2 n FLOP),
take 2 d / n polar factors, and rotate four matrices (8 d^2 n FLOP again). At DeBERTa-v3-large's shape (24 layers, d =
1024, n = 64) that is 12.9 + 12.9 GFLOP and 768 factors; no implementation that returns the rewritten matrices avoids
either GEMM. An SVD of 64 x 64 takes LAPACK about as long as 50 GEMMs of that size; the iteration that replaces it
(`symmetry/groups/procrustes.py`) takes 27, certificate included. So on one core, where the transcription loses little
to its loop over heads, the gain is bounded even at the peak rate of GEMM:

{bound}

A target of 2.5 or 8 above its bound cannot be met on one core with such factors. The rest of a larger gain comes from
more cores: the transcription's matrices are too small for threads inside a GEMM or an SVD, while whole layers run side
by side here. With rescaling the transcription's share grows by its passes over every head (norms, inner products,
Eq. 11 at every root), which here are row norms beside the cross-moments and a quartic in closed form.

## Which solver assigns

SciPy's shortest augmenting paths after a column shift from annealed Sinkhorn scaling (`symmetry/assignment.py`),
against the sparse solver with its proof (`symmetry/certified.py`), SciPy without the shift, and lapx 0.11.1. Processor
seconds of one thread, by `python -m benchmarks.solvers --sizes 1024,2048` with other work on the machine: differences
below a third say nothing. Every solver found the same total.

| score | n | ours | sparse | SciPy | lapx |
| --- | --- | --- | --- | --- | --- |
| independent | 1024 | 0.028 | 0.024 | 0.046 | 0.045 |
| uneven norms, shared mean | 1024 | 0.079 | - | 0.225 | 1.304 |
| one base, noise of 6 | 1024 | 0.023 | 0.027 | 0.034 | 0.025 |
| independent | 2048 | 0.150 | 0.098 | 0.246 | 0.247 |
| uneven norms, shared mean | 2048 | 0.626 | - | 1.563 | 11.077 |
| one base, noise of 6 | 2048 | 0.094 | 0.093 | 0.063 | 0.040 |

lapx wins where the models are near, by hundredths of a second, and loses seconds where they are not. Where every
neuron's largest entry is in a column of its own, as between models of one base, no solver runs. From 6144 neurons on
the sparse solver comes first, on the entries near each row's largest: one pass over the whole score proves its
solution or finds the entries that are missing, and nothing of the size of the score is then held in float64. A dash:
too many entries are near the largest, and the dense solver takes over.
"""


def document(results: Sequence[dict[str, Any]], setting: dict[str, Any], command: str) -> str:
    """docs/performance.md."""
    names = ("gemm", "svd", "assignment", "memory")
    parts = [
        [
            r["row"],
            f"{r['floor_parts']['flops'] / 1e9:.1f}",
            *(f"{r['floor_parts'][part]:.3g} s" for part in names),
        ]
        for r in results
    ]
    return TEXT.format(
        **{**setting, "gemm": setting["gemm"] / 1e9, "copy": setting["copy"] / 1e9},
        command=command,
        table=_markdown(HEAD, [cells(result) for result in results]),
        parts=_markdown(("row", "cross-moment GFLOP", *names), parts),
        bound=_markdown(("row", "plain", "no faster than", "gain at most"), [_bound(r) for r in results if _alone(r)]),
    )


def _alone(result: dict[str, Any]) -> bool:
    return result["row"].startswith("attention") and result["plain"] is not None


def _bound(result: dict[str, Any]) -> list[str]:
    """Both GEMMs at the peak rate, the factors by iteration, memory once; all of it perfectly parallel."""
    parts = result["floor_parts"]
    least = 2 * parts["gemm"] + parts["svd"] * FACTOR + parts["memory"]
    return [result["row"], f"{result['plain']:.3g} s", f"{least:.3g} s", f"{result['plain'] / least:.2f}x"]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _or_dash(value: float | None, style: str, target: float | None = None, higher: bool = True) -> str:
    if value is None:
        return "-"
    missed = target is not None and (value < target if higher else value > target)
    return style.format(value) + (" *" if missed else "")
