# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.progressive`: progressive merging beside the forward passes that it needs.

Two models of BERT-base's size with random weights, 128 sequences of 128 random tokens. A merge needs one pass of every
model and one of the merged model, and, where it chooses ridges, four over the data held out: of both models, of their
average and of the merged model. Everything else it does, which is normal equations, their solution and bookkeeping, is
what the ratio shows above 1.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, BertModel

from onebasin.fusion.method import Sources
from onebasin.fusion.progressive import RIDGES, merge_progressively
from onebasin.models import Folder
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import Batch, run

OUTPUT = Path("build/bench/progressive.json")
TARGET = 2.5  # at most


def main(
    layers: Annotated[int, typer.Option(help="layers of both models", min=1)] = 12,
    sequences: Annotated[int, typer.Option(help="calibration sequences", min=32)] = 128,
    tokens: Annotated[int, typer.Option(help="tokens in each", min=2)] = 128,
    threads: Annotated[int, typer.Option(help="torch threads (0: its default)", min=0)] = 0,
) -> None:
    """Time one forward pass, a merge with one ridge, and one that chooses each layer's among the usual ones."""
    if threads:
        torch.set_num_threads(threads)
    result = measure(layers, sequences, tokens)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(f"one forward pass {result['forward']:.2f} s")
    for row in result["merges"]:
        print(f"{row['ridges']} ridge(s): {row['seconds']:.2f} s, {row['passes']:.2f} passes, ratio {row['ratio']:.2f}")


def measure(layers: int, sequences: int, tokens: int) -> dict[str, Any]:
    """`forward`: seconds of one model over all data. `merges`: seconds, passes needed, and the ratio of the two."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (sequences, tokens), generator=generator)
    batches: list[Batch] = [{"input_ids": some} for some in torch.split(ids, 32)]
    with tempfile.TemporaryDirectory() as place:
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            BertModel(BertConfig(num_hidden_layers=layers)).save_pretrained(Path(place) / str(seed))  # type: ignore[call-arg, unused-ignore]
            models.append(Folder(Path(place) / str(seed)))
        stock = loaded_model(models[0])
        run(stock, batches[0])  # so that libraries have buffers
        forward = min(_seconds(lambda: [run(stock, batch) for batch in batches]) for _ in range(2))
        merges = []
        for ridges in (RIDGES[1:2], RIDGES):
            taken = _seconds(
                lambda ridges=ridges: merge_progressively(  # type: ignore[misc]
                    Sources(models, [0.5, 0.5]), batches, ridge=ridges
                )
            )
            passes = 3 + (4 / len(batches) if len(ridges) > 1 else 0)  # of four batches one is held out
            merges.append(
                {"ridges": len(ridges), "seconds": taken, "passes": passes, "ratio": taken / passes / forward}
            )
    return {
        "layers": layers, "sequences": sequences, "tokens": tokens, "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0], "forward": forward, "merges": merges, "target": TARGET,
    }  # fmt: skip


def _seconds(job: Callable[[], Any]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
