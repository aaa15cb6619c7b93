# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.progressive`: progressive merging beside the forward passes that it needs, and its memory.

Two models with random weights, and sequences of random tokens. A merge needs one pass of every model and one of the
merged model, and, where it chooses ridges, four over the data held out: of both models, of their average and of the
merged model. Everything else it does, which is normal equations, their solution, bookkeeping and the disk, is what the
ratio shows above 1. Seconds are of processor time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from onebasin.data.teaching import split_held_out
from onebasin.engine import peak_memory
from onebasin.fusion.method import Sources
from onebasin.fusion.progressive import RIDGES, ProgressiveMerge, merge_progressively
from onebasin.models import Folder
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import Batch, run

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def main(
    shape: Annotated[str, typer.Option(help="bert (base, 12 layers) or smollm2 (135M, 30 layers)")] = "bert",
    layers: Annotated[int, typer.Option(help="layers of both models")] = 12,
    sequences: Annotated[int, typer.Option(help="calibration sequences", min=32)] = 128,
    tokens: Annotated[int, typer.Option(help="tokens in each", min=2)] = 128,
    batch: Annotated[int, typer.Option(help="sequences in a batch", min=1)] = 32,
    ridges: Annotated[int, typer.Option(help="how many ridges layers choose from", min=1, max=len(RIDGES))] = 8,
    threads: Annotated[int, typer.Option(help="torch threads", min=1)] = 1,
) -> None:
    """Time one forward pass and a merge, and print the peak memory of the merge, the program included."""
    torch.set_num_threads(threads)
    ids = torch.randint(1000, 30000, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    batches: list[Batch] = [{"input_ids": some} for some in torch.split(ids, batch)]
    with tempfile.TemporaryDirectory() as place:
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            _model(shape, layers).save_pretrained(Path(place) / str(seed))
            models.append(Folder(Path(place) / str(seed)))
        forward = _pass(models[0], batches)
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # Linux: a new high-water mark from here
        how = ProgressiveMerge(ridge=RIDGES[1:2] if ridges == 1 else RIDGES[:ridges])
        taken = _seconds(lambda: merge_progressively(Sources(models, [0.5, 0.5]), batches, how=how))
    held = len(split_held_out(batches, None)[1]) / len(batches) if ridges > 1 else 0.0
    passes = 3 + 4 * held
    print(f"{shape}, {layers} layers, {sequences} x {tokens} tokens in batches of {batch}, {ridges} ridge(s)")
    ratio = taken / passes / forward
    print(f"one forward pass {forward:.1f} s; merge {taken:.1f} s, {ratio:.2f} times {passes:.2f} passes")
    print(f"peak memory {peak_memory() / 1e9:.2f} GB")


def _model(shape: str, layers: int) -> Any:
    if shape == "bert":
        return BertModel(BertConfig(num_hidden_layers=layers))  # type: ignore[call-arg, unused-ignore]
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SMOLLM2))


def _pass(model: Folder, batches: list[Batch]) -> float:
    stock = loaded_model(model)
    run(stock, batches[0])  # so that libraries have buffers
    return _seconds(lambda: [run(stock, some) for some in batches])


def _seconds(job: Callable[[], Any]) -> float:
    started = time.process_time()
    job()
    return time.process_time() - started


if __name__ == "__main__":
    typer.run(main)
