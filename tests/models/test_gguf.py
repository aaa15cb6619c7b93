# SPDX-License-Identifier: Apache-2.0
"""A GGUF file is refused with a program that makes a folder of it; the program runs, and its folder can be matched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from onebasin.models import Folder, ModelError

WIDTH, HEADS, NEURONS, WORDS = 32, 2, 64, 48


def packed(folder: Path) -> Path:
    """A Llama of one layer, in 8 bits where they pack it."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder.mkdir()
    file = folder / "model-q8.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(WORDS)
    shapes = {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (NEURONS, WIDTH) for name in ("gate", "up")} | {"blk.0.ffn_down": (WIDTH, NEURONS)}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_program_that_a_packed_file_is_refused_with_makes_a_folder(tmp_path: Path) -> None:
    file = packed(tmp_path / "packed")
    with pytest.raises(ModelError) as refused:
        Folder(file)
    _, _, program = str(refused.value).partition("accelerate): ")
    exec(program, {"transformers": transformers, "FOLDER": tmp_path / "written"})
    written = Folder(tmp_path / "written")
    assert written.config["hidden_size"] == WIDTH
    assert written.read("layers.0.mlp.down_proj.weight").shape == (WIDTH, NEURONS)
