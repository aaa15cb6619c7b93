# SPDX-License-Identifier: Apache-2.0
"""Merging from disk to disk, beside the floor of its ingredients and beside mergekit's plain average.

    python -m benchmarks.disk [--kind independent|fine-tuned] [--layers N] [--mergekit PYTHON] [--workers 1,2] [--ray]
        [--library] [--repeats N]

Makes two synthetic BERT-large folders (float32, 1.3 GB each) and merges them in processes of their own. PYTHON is an
interpreter that has mergekit, which need not be the one that runs onebasin. All is measured in turn, N times; of each
the run of the middle is reported. Everybody writes into a new folder, and no output is removed before a round is over:
what is written into memory that was just let go is written faster. Results go to build/bench, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, BertForSequenceClassification

from onebasin.matching import Run, match_weights
from onebasin.models import Folder, read_pair, write_model
from onebasin.symmetry import acting_groups

from . import floor as floors
from .report import OUTPUT

WIDTHS = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
STD, NOISE = 0.02, 0.02  # of the weights; of a fine-tuned model around its base, in units of the former


def main(
    kind: Annotated[str, typer.Option(help="independent, or fine-tuned (one base)")] = "fine-tuned",
    layers: Annotated[int, typer.Option(help="of the 24 layers")] = 24,
    folder: Annotated[Path, typer.Option(help="where the models are made and kept")] = Path("build/bench/disk"),
    mergekit: Annotated[str, typer.Option(help="an interpreter that has mergekit")] = "",
    verify: Annotated[
        str, typer.Option(help="how onebasin verifies: outputs (the default), tensors, none")
    ] = "outputs",
    workers: Annotated[str, typer.Option(help="threads of onebasin, each measured")] = str(os.cpu_count() or 1),
    ray: Annotated[bool, typer.Option(help="measure a local Ray cluster, too")] = False,
    library: Annotated[bool, typer.Option(help="measure the same merge called from Python, too")] = False,
    repeats: Annotated[int, typer.Option(help="how often all is measured, in turn")] = 3,
    keep: Annotated[bool, typer.Option(help="leave the models, 4 GB, for the next time")] = False,
) -> None:
    """Merge two BERT-large models from disk to disk: seconds, peak memory, and the floor."""
    torch.set_num_threads(os.cpu_count() or 1)
    models = [folder / f"{kind}-{layers}-{number}" for number in range(2)]
    for number, model in enumerate(models):
        if not (model / "config.json").is_file():
            make(model, kind, layers, number)
    size = (models[0] / "model.safetensors").stat().st_size
    warm(models)
    how = ["--match", "paper", "--verify", verify, "--quiet"]
    command = [sys.executable, "-c", "from onebasin.cli import app; app()", "merge", *map(str, models), *how]
    jobs: dict[str, Callable[[Path], dict[str, float]]] = {}
    for count in workers.split(","):
        jobs[f"onebasin, {count} workers"] = partial(measured, [*command, "--workers", count, "-o"])
    if library:
        call = f"onebasin.merge({[*map(str, models)]}, sys.argv[1], match='paper', verify={verify!r}, verdict=False)"
        jobs["onebasin, library"] = partial(measured, [sys.executable, "-c", f"import onebasin, sys; {call}"])
    if ray:
        jobs["onebasin, Ray"] = partial(measured, [*command, "--ray", "local", "-o"])
    jobs["floor"] = partial(floor, models)
    if mergekit:
        recipe = folder / "recipe.yml"
        recipe.write_text(json.dumps(linear(models)))
        jobs["mergekit"] = partial(measured, [mergekit, "-m", "mergekit.scripts.run_yaml", "--quiet", str(recipe)])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    outputs = [folder / f"out-{number}" for number in range(len(jobs))]
    for _ in range(repeats):
        clear(outputs)
        for (name, job), out in zip(jobs.items(), outputs, strict=True):
            os.sync()  # nothing that an earlier one wrote waits for the disk
            runs[name].append(job(out))
    clear(outputs)
    result: dict[str, Any] = {"kind": kind, "layers": layers, "bytes": size, "all seconds": {}}
    for name, every in runs.items():
        result[name] = sorted(every, key=lambda run: run["seconds"])[len(every) // 2]
        result["all seconds"][name] = [round(run["seconds"], 2) for run in every]
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.with_name(f"disk-{kind}.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result, indent=2))
    clear([] if keep else [*models, *map(bare, models)])


def clear(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def make(folder: Path, kind: str, layers: int, number: int) -> None:
    """Random weights; a fine-tuned pair shares most of them."""
    config = BertConfig(num_hidden_layers=layers, architectures=["BertForSequenceClassification"], **WIDTHS)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in BertForSequenceClassification(config).state_dict().items()}
    config.save_pretrained(bare(folder))
    base = torch.Generator().manual_seed(0 if kind == "fine-tuned" else number)
    own = torch.Generator().manual_seed(number + 1)

    def tensors() -> Any:
        for name, shape in shapes.items():
            tensor = STD * torch.randn(shape, generator=base)
            if kind == "fine-tuned":
                tensor += STD * NOISE * torch.randn(shape, generator=own)
            yield name, tensor + 1 if "LayerNorm.weight" in name else tensor

    like = Folder(bare(folder))
    like.__dict__["files"] = dict.fromkeys(shapes, bare(folder))
    write_model(folder, tensors(), like, dtype=torch.float32)


def warm(models: list[Path]) -> None:
    """Read the models once, so that whoever is measured first does not wait for the disk alone."""
    for model in models:
        with (model / "model.safetensors").open("rb") as file:
            while file.read(1 << 24):
                pass


def bare(folder: Path) -> Path:
    """Where the config of a model lies before there is a model."""
    return folder.with_name(f"{folder.name}-config")


def measured(command: list[str], out: Path) -> dict[str, float]:
    """Wall and CPU seconds and the largest resident set (bytes) of a process of its own, which writes `out`."""
    start = time.perf_counter()
    process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.read() if process.stderr else ''}")
    return {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "peak": 1024.0 * usage.ru_maxrss}


def floor(models: list[Path], out: Path) -> dict[str, float]:
    """Seconds that nobody can undercut: both models read, GEMM and solvers of matching, the result written.

    GEMM and solvers are those that matching asks for in the first two layers, times the number of layers.
    """
    source, anchor = (Folder(model) for model in models)
    groups = acting_groups(source.signature, "paper")
    roles = [role for role, entry in source.signature.tensors.items() if entry.alias is None]
    some = [role for role in roles if source.signature.tensors[role].layer in (0, 1)]
    times = len(source.signature.layers) / 2
    start = time.perf_counter()
    for model in (source, anchor):
        for role in roles:
            model.read(role).sum()
    read = time.perf_counter() - start
    start = time.perf_counter()
    write_model(out, ((name, source.read_name(name)) for name in source.files), source)
    write = time.perf_counter() - start
    machine = floors.measure()
    with floors.tracing(groups, time.perf_counter) as found:
        read_both = partial(read_pair, anchor, source)
        match_weights(source.signature, read_both, groups, roles=some, run=Run(1, measure=False))
    gemm = times * found.flops / machine.gemm
    solvers = times * (found.svd + found.assignment)  # timed on all cores
    return {"read": read, "gemm": gemm, "solvers": solvers, "write": write, "seconds": read + gemm + solvers + write}


def linear(models: list[Path]) -> dict[str, Any]:
    """mergekit's recipe for a plain average."""
    parts = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": parts, "dtype": "float32"}


if __name__ == "__main__":
    typer.run(main)
