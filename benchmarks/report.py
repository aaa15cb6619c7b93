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


PAGE = Path("docs/performance.md")
BEGIN, END = "<!-- rows: python -m benchmarks --write-docs -->\n", "<!-- end of rows -->\n"
TEXT = """
By `{command}`:

{table}

What the floor consists of:

{parts}

How far attention can be from the transcription:

{bound}

Machine: {processor}, {threads} thread(s), GEMM {gemm:.1f} GFLOP/s, copy {copy:.1f} GB/s, load average {load:.1f}
before the first row, torch {torch}; {clock} seconds, median of {repeats}.

"""


def write_page(results: Sequence[dict[str, Any]], setting: dict[str, Any], command: str) -> None:
    """Put the tables between the two marks of docs/performance.md; the rest of the page is written by hand."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + document(results, setting, command) + END + after, "utf-8")


def document(results: Sequence[dict[str, Any]], setting: dict[str, Any], command: str) -> str:
    """The part of docs/performance.md that is measured."""
    names = ("gemm", "svd", "assignment", "memory")
    parts = [
        [
            r["row"],
            f"{r['floor_parts']['flops'] / 1e9:.1f}",
            f"{sum(r['floor_parts']['rotations'].values()) / 1e9:.1f}",
            *(f"{r['floor_parts'][part]:.3g} s" for part in names),
        ]
        for r in results
    ]
    return TEXT.format(
        **{**setting, "gemm": setting["gemm"] / 1e9, "copy": setting["copy"] / 1e9},
        command=command,
        table=_markdown(HEAD, [cells(result) for result in results]),
        parts=_markdown(("row", "cross-moment GFLOP", "rotation GFLOP", *names), parts),
        bound=_markdown(("row", "plain", "no faster than", "gain at most"), [_bound(r) for r in results if _alone(r)]),
    )


def _alone(result: dict[str, Any]) -> bool:
    return result["row"].startswith("attention") and result["plain"] is not None


def _bound(result: dict[str, Any]) -> list[str]:
    """The floor with factors by iteration; all of it perfectly parallel."""
    parts = result["floor_parts"]
    least = parts["gemm"] + parts["svd"] * FACTOR + parts["memory"]
    return [result["row"], f"{result['plain']:.3g} s", f"{least:.3g} s", f"{result['plain'] / least:.2f}x"]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _or_dash(value: float | None, style: str, target: float | None = None, higher: bool = True) -> str:
    if value is None:
        return "-"
    missed = target is not None and (value < target if higher else value > target)
    return style.format(value) + (" *" if missed else "")
