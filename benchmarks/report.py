# SPDX-License-Identifier: Apache-2.0
"""The table on the screen and in docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

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
SciPy's assignment, dense permutation matrices. Both run in float32 with the same threads, taking turns; seconds are
medians. For joint rescaling *plain* rescales afterwards, as the paper does.

*floor*: the FLOPs of the cross-moments at the rate of this machine's fastest square GEMM, the SVDs and assignments
alone on the same matrices, and both models read and the result written once at the speed of a copy. The GEMMs that
rotate the result are not in it.

*peak MB*: growth of the resident set in a process of its own, where every tensor is made when it is read and dropped
when it is written. A * marks a missed target.

{table}

What the floor consists of:

{parts}

Machine: {processor}, {threads} thread(s), GEMM {gemm:.1f} GFLOP/s, copy {copy:.1f} GB/s, load average {load:.1f}
before the first row, torch {torch}; {clock} seconds, median of {repeats}.
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
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _or_dash(value: float | None, style: str, target: float | None = None, higher: bool = True) -> str:
    if value is None:
        return "-"
    missed = target is not None and (value < target if higher else value > target)
    return style.format(value) + (" *" if missed else "")
