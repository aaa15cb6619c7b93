# SPDX-License-Identifier: Apache-2.0
"""Peak memory of jobs on models of different depth. Run as: footprint.py FOLDER [JOB...] [KEY=NUMBER...]; prints JSON.

The keys are those of a Llama's config, for other widths: hidden_size=4096 intermediate_size=11008 and so on; bits=16
stores the models in bfloat16; depths=2,8 says how many layers, workers=1 how many threads (default: 2).
Jobs: paper, full, canonical, distance, verify, run, or all. What is written is removed again.
Every job runs in a fork of this process, which has imported everything and computed nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

import onebasin
from onebasin.engine import peak_memory
from onebasin.models import Folder, write_model

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 500}  # fmt: skip


def import_everything() -> None:
    """Import all modules that a job may need, so that forks begin at once, not seconds later."""
    for module in pkgutil.walk_packages(onebasin.__path__, "onebasin."):
        if not module.name.startswith(("onebasin.__main__", "onebasin.cli", "onebasin.studies")):
            importlib.import_module(module.name)


def make(folder: Path, layers: int, seed: int, **shape: Any) -> Path:
    """A Llama of random weights, written tensor by tensor."""
    shape = {**SHAPE, **shape}
    dtype = {16: torch.bfloat16, 32: torch.float32}[shape.pop("bits", 32)]
    config = LlamaConfig(num_hidden_layers=layers, architectures=["LlamaForCausalLM"], **shape)
    bare = folder.with_name(f"{folder.name}-config")
    config.save_pretrained(bare)
    d, f = config.hidden_size, config.intermediate_size
    kv = d // config.num_attention_heads * config.num_key_value_heads
    sizes = {"model.embed_tokens.weight": (config.vocab_size, d), "model.norm.weight": (d,),
             "lm_head.weight": (config.vocab_size, d)}  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", d, d), ("k", kv, d), ("v", kv, d), ("o", d, d)):
            sizes[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
        for name, rows, columns in (("gate", f, d), ("up", f, d), ("down", d, f)):
            sizes[f"{at}mlp.{name}_proj.weight"] = (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{at}{name}.weight"] = (d,)
    generator = torch.Generator().manual_seed(seed)
    like = Folder(bare)
    like.__dict__["files"] = dict.fromkeys(sizes, bare)
    like.others = lambda: iter(())  # type: ignore[method-assign]
    tensors = ((name, 0.02 * torch.randn(size, generator=generator)) for name, size in sizes.items())
    write_model(folder, tensors, like, dtype=dtype)
    return folder


def alone(job: Callable[[], object]) -> int:
    """The peak memory of a job in bytes, measured in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Path("/proc/self/clear_refs").write_text("5", "utf-8")  # Linux: a new high-water mark from here
            torch.set_num_threads(1)
            job()
            os.write(writing, str(peak_memory()).encode())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("the job failed")
    return int(text)


def jobs(folder: Path, layers: int, workers: int) -> dict[str, Callable[[], object]]:
    pair = [folder / f"{layers}-{seed}" for seed in range(2)]
    how: dict[str, Any] = {"verify": "tensors", "rescale": "none", "workers": workers, "max_sweeps": 1}
    return {
        "make": lambda: [make(model, layers, seed) for seed, model in enumerate(pair)],
        "paper": lambda: onebasin.merge(pair, folder / f"paper-{layers}", match="paper", verdict=False, **how),
        "full": lambda: onebasin.match(*pair, folder / f"full-{layers}", symmetry="full", **how),
        "canonical": lambda: onebasin.canonical(pair[0], folder / f"canonical-{layers}", verify="none"),
        "distance": lambda: onebasin.distance(*pair),
        "verify": lambda: onebasin.verify(*pair, tensors=True),
        "run": lambda: onebasin.verify(pair[0], pair[0]),
    }


def main(folder: Path, *words: str) -> None:
    import_everything()
    given = dict(word.split("=") for word in words if "=" in word)
    wanted = {word for word in words if "=" not in word}
    depths = [int(number) for number in given.pop("depths", "2,4,8").split(",")]
    workers = int(given.pop("workers", "2"))
    SHAPE.update((key, int(number)) for key, number in given.items())
    peaks: dict[str, dict[int, int]] = {}
    for layers in depths:
        room = folder / str(layers)
        room.mkdir(parents=True)
        for name, job in jobs(room, layers, workers).items():
            if name == "make" or not wanted or name in wanted:
                peaks.setdefault(name, {})[layers] = alone(job)
                print(layers, name, peaks[name][layers], file=sys.stderr, flush=True)
        shutil.rmtree(room)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
