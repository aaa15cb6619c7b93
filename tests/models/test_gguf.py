# SPDX-License-Identifier: Apache-2.0
"""Packed and quantised models are refused with a program that makes a folder of them; the program runs, and its folder
can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

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


def test_the_program_that_a_quantised_model_is_refused_with_makes_a_folder(tmp_path: Path) -> None:
    """FP8: floating-point tensors, without the scales."""
    size = 128
    config = transformers.LlamaConfig(
        hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=2, vocab_size=WORDS
    )
    model, stored = transformers.LlamaForCausalLM(config), {}
    for name, tensor in model.state_dict().items():
        if "proj" in name:
            scale = tensor.abs().max() / 448
            stored |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
        else:
            stored[name] = tensor
    folder = tmp_path / "few"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [size, size], "activation_scheme": "dynamic"}
    facts = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError) as refused:
        _ = Folder(folder).config
    _, _, program = str(refused.value).partition("point first: ")
    exec(program, {"transformers": transformers, "FOLDER": tmp_path / "written"})
    written = Folder(tmp_path / "written").read("layers.0.mlp.down_proj.weight")
    torch.testing.assert_close(written, model.model.layers[0].mlp.down_proj.weight.detach(), rtol=0.1, atol=1e-3)
