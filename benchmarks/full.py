# SPDX-License-Identifier: Apache-2.0
"""Matching of a synthetic Llama and a scrambled copy of it, disk to disk: processor seconds by part, and floor.

    python -m benchmarks.full [--row NAME]... [--layers N]... [--level LEVEL]... [--vocabulary N] [--workers N]
                              [--apart] [--keep] [--count]

Weights are random and stored in bfloat16, the copy is made by examples/scramble.py, which shares no code with onebasin.
Matching runs in a process of its own with one thread for every worker, and its parts are timed by the thread that runs
them, so that other work on the machine hardly counts. --apart: two models that have nothing in common instead of
copies, where no order of neurons can be proved. Rows of width 4096, and whole models (of SmolLM2-135M's sizes, and of
a billion parameters and more), only run where they are named. --count runs nothing, and counts what would be multiplied
and read. Results go to build/bench/full.json.

The floor of a sweep: both models read once, every tensor rotated once, the moments of the stream and of the heads, and,
apart, of the neurons, at the rate of this machine's fastest square GEMM; one SVD of the stream's size; and what solvers
took. The floor of the job adds the moments of the start, and one rotation of what is written.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

import onebasin
from examples.scramble import scramble
from onebasin.engine import peak_memory, threads
from onebasin.jobs import aligning, writing
from onebasin.jobs import match as matching
from onebasin.matching import coordinate_descent as descent
from onebasin.models import folder, views
from onebasin.symmetry import alignment
from onebasin.symmetry.groups import grouped, orthogonal, permutation, wreath

from . import floor as floors
from .disk import measured
from .report import OUTPUT

STD = 0.02  # of every weight


@dataclass(frozen=True)
class Shape:
    """Of a Llama; rare: it takes minutes, and runs where it is named alone."""

    width: int
    neurons: int
    heads: int
    keys: int
    vocabulary: int
    layers: int = 2
    rare: bool = False

    @property
    def numbers(self) -> int:
        """Of all matrices."""
        layer = 2 * self.width**2 * (1 + self.keys / self.heads) + 3 * self.width * self.neurons
        return int(self.layers * layer) + 2 * self.vocabulary * self.width


ROWS = {
    "576": Shape(576, 1536, 9, 3, 4096),
    "768": Shape(768, 2048, 12, 4, 4096),
    "1024": Shape(1024, 2816, 16, 4, 4096),
    "2048": Shape(2048, 5632, 32, 4, 8192),
    "4096": Shape(4096, 11008, 32, 32, 8192, rare=True),
    "4096, grouped": Shape(4096, 14336, 32, 8, 128256, rare=True),
    "135M": Shape(576, 1536, 9, 3, 49152, 30, rare=True),
    "1.1B": Shape(2048, 5632, 32, 4, 32000, 22, rare=True),
    "7B": Shape(4096, 11008, 32, 32, 32000, 32, rare=True),
    "70B": Shape(8192, 28672, 64, 8, 128256, 80, rare=True),
}
PROGRAM = 0.43e9  # bytes of a job on tiny models
SOLVERS = ("head pairs", "gains", "assignment", "order proofs")
# Where what a part runs is called: module or class, name.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "reading": [(folder.Folder, "read")],
    "canonical form": [(views.Canonical, "read")],
    "rotations": [(alignment.Alignment, "apply")],
    "stream moments": [(descent, "cross_moments")],
    "neuron moments": [(descent, "pairwise_moments"), (descent, "outer_moments")],
    "head moments": [(descent, "grouped_moments")],
    "order proofs": [(descent, "proved")],
    "gains": [(wreath, "_gain")],
    "head pairs": [(grouped.GroupedWreath, "nearest")],
    "assignment": [(module, "assignment") for module in (wreath, grouped, permutation)],
    "polar factor": [(orthogonal, "polar")],
    "distances": [(descent, "squared_distance"), (aligning, "before_and_after")],
    "verification": [(matching, "verified"), (writing, "verified")],
    "writing": [(matching, "write_into"), (writing, "write_into")],
}


def main(
    row: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(ROWS)} (default: all but rare ones)")
    ] = None,
    layers: Annotated[list[int] | None, typer.Option(help="instead of the row's; each is run", min=1)] = None,
    level: Annotated[list[str] | None, typer.Option(help="full (the default) or invertible; each is run")] = None,
    vocabulary: Annotated[int, typer.Option(help="instead of the row's (0: as it says)", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="of matching", min=1)] = 1,
    apart: Annotated[bool, typer.Option(help="two models that have nothing in common")] = False,
    sweeps: Annotated[int, typer.Option(help="at most", min=1)] = 100,
    keep: Annotated[bool, typer.Option(help="leave the models for the next time")] = False,
    count: Annotated[bool, typer.Option(help="only count what is multiplied and read, with so many sweeps")] = False,
    place: Annotated[Path, typer.Option("--folder", help="where the models are made")] = Path("build/bench/full"),
) -> None:
    """Match synthetic Llamas at `full` or `invertible`: processor seconds by part, beside the floor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does
    results = []
    names = row or [name for name, shape in ROWS.items() if not shape.rare]
    for name, depth in product(names, layers or [0]):
        shape = ROWS[name]
        shape = replace(shape, layers=depth or shape.layers, vocabulary=vocabulary or shape.vocabulary)
        if count:
            print(counts(name, shape, apart, sweeps))
            continue
        room = place / f"{name}-{shape.layers}-{shape.vocabulary}"
        pair = [room / "model", room / ("other" if apart else "scrambled")]
        if not pair[0].is_dir():
            make(pair[0], shape, 0)
        if not pair[1].is_dir():
            make(pair[1], shape, 1) if apart else scramble(*pair)
        for each in level or ["full"]:
            results.append(run(name, shape, each, pair, room / "out", workers, apart, sweeps))
            print(table(results[-1]), flush=True)
        if not keep:
            shutil.rmtree(room)
    if count:
        return
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.with_name("full.json").write_text(json.dumps(results, indent=2) + "\n", "utf-8")


def make(place: Path, shape: Shape, seed: int) -> None:
    """Write a Llama of random weights in bfloat16, norms apart from 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return (STD * torch.randn(size, generator=generator)).bfloat16()

    def norm() -> Tensor:
        return (1 + 0.2 * torch.randn(shape.width, generator=generator)).bfloat16()

    d, f, some = shape.width, shape.neurons, shape.width // shape.heads * shape.keys
    made = {"model.embed_tokens.weight": matrix(shape.vocabulary, d), "lm_head.weight": matrix(shape.vocabulary, d)}
    made["model.norm.weight"] = norm()
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", d), ("k", some), ("v", some), ("o", d)):
            made[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, d)
        for name, size in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
            made[f"{at}mlp.{name}_proj.weight"] = matrix(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{name}.weight"] = norm()
    config = LlamaConfig(
        hidden_size=d, intermediate_size=f, num_attention_heads=shape.heads, num_key_value_heads=shape.keys,
        num_hidden_layers=shape.layers, vocab_size=shape.vocabulary, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(place)
    save_file(made, place / "model.safetensors", metadata={"format": "pt"})


def run(
    name: str, shape: Shape, level: str, pair: list[Path], out: Path, workers: int, apart: bool, sweeps: int
) -> dict[str, Any]:
    """Match in a process of its own, and count the floor."""
    told = out.with_name("told.json")
    for old in (out, out.with_name(f"{out.name}-anchor")):
        shutil.rmtree(old, ignore_errors=True)
    given = [str(pair[1]), str(pair[0]), str(told), level, str(workers), str(sweeps)]
    whole = measured([sys.executable, "-c", "from benchmarks.full import job; job()", *given], out)
    found = json.loads(told.read_text("utf-8"))
    relative = onebasin.distance(out, out.with_name(f"{out.name}-anchor")).relative
    foretold = PROGRAM + onebasin.check(*pair, workers=workers)["memory"][level][apart]
    return {
        "row": name, **asdict(shape), "level": level, "apart": apart, "workers": workers, "relative": relative,
        "foretold": foretold, **whole, **found, **floor_of(shape, apart, found),
    }  # fmt: skip


def job() -> None:
    """Match, parts timed by the thread that runs them; `told` gets the seconds before, in and after the sweeps."""
    torch.set_num_threads(1)
    source, anchor, told, level, workers, sweeps, out = sys.argv[1:]
    seconds: dict[str, dict[str, float]] = {when: defaultdict(float) for when in ("before", "sweeps", "after")}
    when, mine, lock = ["before"], threading.local(), threading.Lock()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; what it takes counts for its part, less what parts inside it take."""

        @wraps(function)
        def wrapper(*given: Any, **named: Any) -> Any:
            stack = mine.__dict__.setdefault("stack", [0.0])
            start = time.thread_time()
            stack.append(0.0)
            try:
                return function(*given, **named)
            finally:
                taken = time.thread_time() - start
                inside = stack.pop()
                stack[-1] += taken
                with lock:
                    seconds[when[0]][part] += taken - inside

        return wrapper

    sweep = descent.CoordinateDescent._sweep
    objective: list[float] = []

    def phased(self: Any) -> None:
        when[0] = "sweeps"
        sweep(self)
        when[0] = "after"
        objective[:] = self.objective

    with ExitStack() as stack:
        for part, places in PARTS.items():
            for place, name in places:
                stack.enter_context(patch.object(place, name, timed(part, getattr(place, name))))
        stack.enter_context(patch.object(descent.CoordinateDescent, "_sweep", phased))
        found = onebasin.match(
            source, anchor, out, symmetry=level, workers=int(workers), max_sweeps=int(sweeps), overwrite=True
        )
    ends = {"before": found["distance_before"], "after": found["distance_after"]}
    facts = {"peak": peak_memory(), "seconds_of": seconds, "sweeps": len(objective) - 1, "objective": objective, **ends}
    Path(told).write_text(json.dumps(facts), "utf-8")


def products(shape: Shape, apart: bool) -> dict[str, float]:
    """FLOP of a sweep that no implementation of the same steps can do without, by part."""
    d, rotation = shape.width, 2.0 * shape.width * shape.numbers
    some = d // shape.heads * shape.keys
    return {
        "rotations": rotation,
        "stream moments": rotation,
        "head moments": 4.0 * shape.layers * (d**3 + some**2 * d),
        "neuron moments": 6.0 * apart * shape.layers * shape.neurons**2 * d,
    }


def counts(name: str, shape: Shape, apart: bool, sweeps: int) -> str:
    """What a job multiplies and reads: its sweeps, and at the end three rotations (for the distance, to verify, to
    write)."""
    flop = products(shape, apart)
    sweep = sum(flop.values())
    whole = sweeps * sweep + 3 * flop["rotations"]
    size = shape.numbers / 1e9
    return (f"{name}: {size:.2f} billion numbers, {sweep / 1e12:.1f} TFLOP a sweep, {whole / 1e12:.0f} TFLOP for "
            f"{sweeps} sweeps and the ends, {2 * 2 * (sweeps + 3) * size:.0f} GB read")  # fmt: skip


def floor_of(shape: Shape, apart: bool, found: dict[str, Any]) -> dict[str, Any]:
    """Seconds that a sweep and the whole job cannot undercut, by part."""
    d = shape.width
    with threads(1):  # beside other programs, threads that wait for each other count too
        machine = floors.measure(time.process_time, (1024, 2048))
        svd = floors.timed(lambda: torch.linalg.svd(torch.randn(d, d)), time.process_time)[0]
    counted = {part: flop / machine.gemm for part, flop in products(shape, apart).items()}
    reading = 2 * 6 * shape.numbers / machine.copy  # 2 bytes read, 4 written
    sweep = {"reading": reading, **counted, "polar factor": svd}
    solvers = {part: found["seconds_of"]["sweeps"].get(part, 0.0) / found["sweeps"] for part in SOLVERS}
    both = {**sweep, **solvers}
    start = 2 * d * 2 * shape.vocabulary * d / machine.gemm + sweep["polar factor"]
    whole = start + found["sweeps"] * sum(both.values()) + counted["rotations"] + sweep["reading"]
    return {"gemm": machine.gemm, "floor_of_sweep": both, "floor": whole}


def table(result: dict[str, Any]) -> str:
    """One row as text."""
    before, sweeps, after = (result["seconds_of"][when] for when in ("before", "sweeps", "after"))
    count, floor = result["sweeps"], result["floor_of_sweep"]
    head = (f"{result['row']}, {result['level']}: {result['layers']} x {result['width']} / {result['neurons']}, "
            f"{count} sweeps, "
            f"{result['cpu']:.1f} CPU s (floor {result['floor']:.1f}), {result['peak'] / 1e9:.2f} GB (foretold "
            f"{result['foretold'] / 1e9:.2f}), relative distance {result['relative']:.2g}, "
            f"GEMM {result['gemm'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    lines = [head, f"{'part':16} {'before':>8} {'a sweep':>8} {'floor':>8} {'after':>8}"]
    for part in PARTS:
        each = (before.get(part, 0.0), sweeps.get(part, 0.0) / count, floor.get(part, 0.0), after.get(part, 0.0))
        lines.append(f"{part:16} " + " ".join(f"{number:8.2f}" for number in each))
    total = (sum(before.values()), sum(sweeps.values()) / count, sum(floor.values()), sum(after.values()))
    return "\n".join([*lines, f"{'all':16} " + " ".join(f"{number:8.2f}" for number in total)])


if __name__ == "__main__":
    typer.run(main)
