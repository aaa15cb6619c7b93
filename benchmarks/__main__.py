# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: all rows, or those whose name contains a given text."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from onebasin.symmetry import Signature

from . import floor as floors
from .report import OUTPUT, show, write_page
from .rows import QUICK, ROWS, Read, Row, ours, plain, prepared

Job = Callable[[Row, Signature, Read], Iterator[dict[str, Tensor]]]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
console = Console(stderr=True)


def main(
    only: Annotated[str, typer.Argument(help="rows whose name contains this")] = "",
    quick: Annotated[bool, typer.Option(help="a small model, no memory: some 20 seconds")] = False,
    layers: Annotated[int, typer.Option(help="cut every model to so many layers (0: as the rows say)", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="runs of each, of which the median counts", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="torch threads (0: its default)", min=0)] = 0,
    clock: Annotated[str, typer.Option(help="wall, or cpu where others use the machine (with one thread)")] = "wall",
    write_docs: Annotated[bool, typer.Option(help="write the tables of docs/performance.md")] = False,
    memory_of: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure matching beside a plain transcription of the paper and beside the machine's floor."""
    if clock not in CLOCKS:
        raise typer.BadParameter(f"unknown clock '{clock}'; choose from {', '.join(CLOCKS)}")
    if threads:
        torch.set_num_threads(threads)
    table = [replace(row, layers=layers or row.layers) for row in (QUICK if quick else ROWS)]
    if memory_of:
        who, name = memory_of.split(":")
        print(json.dumps(peak(next(row for row in table if row.name == name), who)))
        return
    rows = [row for row in table if only in row.name]
    if not rows:
        raise typer.BadParameter(f"no row is called '{only}'; there are {', '.join(row.name for row in table)}")
    machine = floors.measure(CLOCKS[clock])
    setting = {
        "processor": _processor(), "threads": torch.get_num_threads(), "clock": clock, "repeats": repeats,
        "load": os.getloadavg()[0], "torch": torch.__version__, **asdict(machine),
    }  # fmt: skip
    results = []
    for row in rows:
        with console.status(f"{row.name}: {row.model}"):
            results.append(run(row, machine, repeats, CLOCKS[clock], quick, threads))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({"setting": setting, "results": results}, indent=2) + "\n", "utf-8")
    show(results, console)
    if write_docs:
        write_page(results, setting, " ".join(["python -m benchmarks", *sys.argv[1:]]))


def run(
    row: Row, machine: floors.Machine, repeats: int, clock: Callable[[], float], quick: bool, threads: int
) -> dict[str, Any]:
    """Time one row: the two implementations in turn, then the floor on the matrices that matching meets.

    What they rewrite is dropped as it comes, as a merge drops what it has written: memory for a whole model would
    otherwise be part of the time.
    """
    signature, tensors = prepared(row)
    read = tensors.__getitem__
    jobs: dict[str, Job] = {"ours": ours, "plain": plain} if row.plain else {"ours": ours}
    seconds: dict[str, list[float]] = {who: [] for who in jobs}
    for _ in range(repeats):
        for who, job in jobs.items():
            taken, _ = floors.timed(partial(deque, job(row, signature, read), 0), clock)
            seconds[who].append(taken)
    with floors.tracing(row.groups(signature), clock) as floor:
        found = _collect(ours, row, signature, read)
    distance = {"ours": _distance(found, tensors)}
    if row.plain:
        distance["plain"] = _distance(_collect(plain, row, signature, read), tensors)
        if distance["ours"] > distance["plain"] * (1 + 1e-5):
            raise RuntimeError(f"{row.name}: ends at {distance['ours']}, the transcription at {distance['plain']}")
    floor = floors.finish(floor, machine, tensors)
    mine = median(seconds["ours"])
    theirs = median(seconds["plain"]) if "plain" in seconds else None
    return {
        "row": row.name, "model": row.model, "kind": row.kind, "level": row.level, "rescale": row.rescale,
        "layers": len(signature.layers), "ours": mine, "plain": theirs, "floor": floor.seconds,
        "faster": theirs and theirs / mine, "faster_target": row.faster,
        "over_floor": mine / floor.seconds, "over_floor_target": row.over_floor,
        "floor_parts": asdict(floor), "runs": seconds, "distance": distance,
        "peak_mb": {} if quick else {who: _peak_apart(row, who, threads) for who in jobs},
    }  # fmt: skip


def peak(row: Row, who: str) -> float:
    """Growth of the resident set in MB, where tensors are made when they are read and dropped once written."""
    made = row.pair()
    job = {"ours": ours, "plain": plain}[who]
    torch.linalg.svd(torch.ones(2, 8, 8) @ torch.ones(2, 8, 8))  # so the libraries have buffers
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # Linux: a new high-water mark from here
    before = _high_water()
    for _ in job(row, made.signature, made.read):
        pass
    return (_high_water() - before) / 1e6


def _high_water() -> int:
    """Largest resident set so far in bytes. Not `resource` on Linux: a child inherits its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text("utf-8").splitlines() if "VmHWM" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _peak_apart(row: Row, who: str, threads: int) -> float:
    cut = ["--layers", str(row.layers or 0)]
    command = [sys.executable, "-m", "benchmarks", "--memory-of", f"{who}:{row.name}", "--threads", str(threads), *cut]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _collect(job: Job, row: Row, signature: Signature, read: Read) -> dict[str, Tensor]:
    return {role: tensor for piece in job(row, signature, read) for role, tensor in piece.items()}


def _distance(found: Mapping[str, Tensor], tensors: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Over the tensors that were rewritten, in float64."""
    apart = ((tensors[role][0].double() - tensor.double()).square().sum() for role, tensor in found.items())
    return math.sqrt(sum(map(float, apart)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    typer.run(main)
