# SPDX-License-Identifier: Apache-2.0
"""How matching grows with layers, width and workers: `python -m benchmarks.scaling`.

Attention matching (closed form) of synthetic weights, and for workers `paper` matching as well; prints JSON, which goes
to build/bench, too. The exponent is the slope of log seconds over log
size by least squares: 1 is linear. With the width d at a fixed head size the GEMMs grow as d^2, the heads as d.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from .floor import timed
from .report import OUTPUT
from .rows import ROWS, Row, ours, prepared

WIDTHS = ("roberta-base", "deberta-v3-large")  # 768 and 1024


def main(
    layers: Annotated[str, typer.Option(help="numbers of layers")] = "3,6,12,24",
    workers: Annotated[str, typer.Option(help="numbers of workers, at the most layers")] = "1,2",
    repeats: Annotated[int, typer.Option(help="runs of each, of which the fastest counts")] = 5,
    cpu: Annotated[bool, typer.Option(help="processor seconds instead of wall: where others use the machine")] = False,
) -> None:
    """Seconds by layers, by width and by workers, and the exponents of growth."""
    clock = time.process_time if cpu else time.perf_counter
    attention = next(row for row in ROWS if row.name == "attention")
    depths = sorted(int(number) for number in layers.split(","))

    def fastest(row: Row, threads: int) -> float:
        torch.set_num_threads(threads)
        signature, tensors = prepared(row)
        runs = [timed(lambda: list(ours(row, signature, tensors.__getitem__)), clock)[0] for _ in range(repeats)]
        return min(runs)

    by_layers = {depth: fastest(replace(attention, layers=depth), 1) for depth in depths}
    by_width = {model: fastest(replace(attention, model=model, layers=min(depths[-1], 12)), 1) for model in WIDTHS}
    counts = [int(number) for number in workers.split(",")]
    deepest = replace(attention, layers=depths[-1])
    by_workers = {count: fastest(deepest, count) for count in counts}
    paper = replace(next(row for row in ROWS if row.name == "paper"), layers=4)
    by_workers_paper = {count: fastest(paper, count) for count in counts}
    result: dict[str, Any] = {
        "clock": "cpu" if cpu else "wall", "layers": by_layers, "layers_exponent": _exponent(by_layers),
        "width": by_width, "width_exponent": _exponent(dict(zip((768, 1024), by_width.values(), strict=True))),
        "workers": by_workers, "workers_paper": by_workers_paper,
    }  # fmt: skip
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.with_name("scaling.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result, indent=2))


def _exponent(seconds: dict[int, float]) -> float:
    x, y = [math.log(size) for size in seconds], [math.log(value) for value in seconds.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - mean_x) ** 2 for a in x)


if __name__ == "__main__":
    typer.run(main)
