# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.learning`: a step of learned matching beside the forward and backward pass that it needs.

Two GPT-2 character models with random weights, 16 sequences of 64 random tokens. A step makes the group's maps, moves
and merges the weights, runs the merged model forward and back, and takes the gradient back into the maps. The ratio
says what it costs over a forward and backward pass of the stock model on the same batch, timed in turn with the steps.
Teachers' answers are kept from the first step, which does not count.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from onebasin.data.teaching import Forward, attention_of, forward_of
from onebasin.matching.learned import Learning, Lessons, match_learned
from onebasin.models import Canonical, Folder
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import Batch
from onebasin.symmetry import Alignment, acting_groups

OUTPUT = Path("build/bench/learning.json")
TARGET = 1.5  # at most
WARM = 3  # steps that do not count
CASES = (("full", "fixed"), ("invertible", "fixed"), ("invertible", "straight-through"))
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main(
    layers: Annotated[int, typer.Option(help="layers of both models", min=1)] = 6,
    width: Annotated[int, typer.Option(help="of the residual stream", min=16)] = 256,
    steps: Annotated[int, typer.Option(help="steps that are timed, of which the median counts", min=2)] = 10,
    threads: Annotated[int, typer.Option(help="torch threads (0: its default)", min=0)] = 0,
    clock: Annotated[str, typer.Option(help="wall, or cpu where others use the machine (with one thread)")] = "wall",
    mixed: Annotated[bool, typer.Option(help="products in bfloat16, in steps and passes")] = False,
) -> None:
    """Time the steps of learned matching, and a forward and backward pass of the same batch."""
    if threads:
        torch.set_num_threads(threads)
    result = measure(layers, width, steps, CLOCKS[clock], mixed)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({**result, "clock": clock}, indent=2) + "\n", "utf-8")
    for row in result["steps"]:
        print(f"{row['level']}, {row['permutations']}: {row['seconds']:.3f} s a step, forward and backward "
              f"{row['pass']:.3f} s, ratio {row['ratio']:.2f}")  # fmt: skip


def measure(layers: int, width: int, steps: int, clock: Callable[[], float], mixed: bool) -> dict[str, Any]:
    """`steps`: per level and kind of permutations, median seconds of a pass and of a step, and their ratio."""
    ids = torch.randint(65, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    batches: list[Batch] = [{"input_ids": some} for some in ids]
    with tempfile.TemporaryDirectory() as place:
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            shape = {"vocab_size": 65, "n_positions": 64, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
            GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, **shape)).save_pretrained(Path(place) / str(seed))
            form = Canonical(Folder(Path(place) / str(seed)), torch.float32)
            models.append(loaded_model(form, attention=attention_of(mixed, "cpu")))
        forward, signature = forward_of(models[0], mixed), models[0].signature
        tensors = [{role: t.detach().clone() for role, t in model.parameter.items()} for model in models]
        rows = []
        for level, permutations in CASES:
            groups = acting_groups(signature, level, rescale="joint")
            taken = _Taken(clock, partial(_forward_and_back, forward, tensors[0], batches[0]), steps)
            lessons = Lessons(forward, batches[:1], batches[1:])
            how = Learning(
                steps=1000 * steps, permutations=permutations, mixed=mixed
            )  # so that no look falls into those timed
            with suppress(StopIteration):
                match_learned(signature, tensors, [Alignment()], groups, lessons, how, taken)
            one, step = median(taken.passes[WARM:]), median(taken.steps[WARM:])
            row = {"level": level, "permutations": permutations, "pass": one, "seconds": step, "ratio": step / one}
            rows.append(row)
    return {
        "layers": layers, "width": width, "mixed": mixed, "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0], "target": TARGET, "steps": rows,
    }  # fmt: skip


class _Taken:
    """What hears of every step: notes how long it took, and times a pass beside it."""

    def __init__(self, clock: Callable[[], float], one_pass: Callable[[], object], steps: int) -> None:
        self.clock, self.one_pass, self.left = clock, one_pass, steps + WARM
        self.steps: list[float] = []
        self.passes: list[float] = []
        self.begun = clock()

    def __call__(self, text: str, loss: float) -> None:
        ended = self.clock()
        self.steps.append(ended - self.begun)
        self.one_pass()
        self.begun = self.clock()
        self.passes.append(self.begun - ended)
        if len(self.steps) == self.left:
            raise StopIteration


def _forward_and_back(forward: Forward, tensors: dict[str, Tensor], batch: Batch) -> None:
    free = [tensor.requires_grad_() for tensor in tensors.values()]
    logits = forward(tensors, batch)["logits"]
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    torch.autograd.grad(loss, free, allow_unused=True)
    for tensor in free:
        tensor.requires_grad_(False)


if __name__ == "__main__":
    typer.run(main)
