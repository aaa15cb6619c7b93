# SPDX-License-Identifier: Apache-2.0
"""Scramble a Llama: another model with the same function, whose weights look as if it had been trained apart.

    python examples/scramble.py MODEL OUT [--seed 0]

A check on matching that shares no code with it: nothing of onebasin is used here. One random element acts in every
space of the model: a rotation of the residual stream; in every layer an order of the heads for keys and values and of
the query heads of each, a complex number for every rotary pair of dimensions, a rotation and a size of the values, an
order of the neurons and a size for each. Weights of norms move into the matrices that read their output, so the head
gets weights of its own where it shared those of the embedding. Computed in float64, a layer at a time, written in the
dtype of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Read = Callable[[str], Tensor]


def rotation(n: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def positive(n: int, generator: torch.Generator) -> Tensor:
    """Positive numbers around 1."""
    return (0.3 * torch.randn(n, dtype=torch.float64, generator=generator)).exp()


def attention(read: Read, at: str, config: dict, stream: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The four matrices of one layer's attention."""
    norm = read(f"{at}.input_layernorm.weight")
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        (read(f"{at}.self_attn.{name}_proj.weight") * norm @ stream.T).unflatten(0, (number, -1))
        for name, number in (("q", heads), ("k", keys), ("v", keys))
    )  # each (heads, n, d)
    o = (stream @ read(f"{at}.self_attn.o_proj.weight")).unflatten(1, (heads, -1)).movedim(1, 0)  # (heads, d, n)
    q, o = (tensor.unflatten(0, (keys, -1)) for tensor in (q, o))  # (keys, queries of each, ...)
    n = k.shape[1]
    # Dimensions i and i + n/2 are one complex number. Turning it commutes with RoPE; q . k stays if |a| |b| = 1.
    angle = 2 * torch.pi * torch.rand(keys, n // 2, 1, dtype=torch.float64, generator=generator)
    size = positive(keys * (n // 2), generator).reshape_as(angle)

    def turned(tensor: Tensor, angle: Tensor, size: Tensor) -> Tensor:
        x, y = tensor.chunk(2, -2)
        return torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), -2) * size

    q = turned(q, angle[:, None], size.repeat(1, 2, 1)[:, None])
    k = turned(k, angle, 1 / size.repeat(1, 2, 1))
    turn = torch.stack([rotation(n, generator) for _ in range(keys)])
    scale = positive(keys, generator)[:, None, None]
    v, o = turn @ v * scale, o @ turn.mT[:, None] / scale[:, None]
    order = torch.randperm(keys, generator=generator)
    inner = torch.stack([torch.randperm(q.shape[1], generator=generator) for _ in range(keys)])
    q, o = (torch.stack([tensor[g, p] for g, p in zip(order, inner, strict=True)]) for tensor in (q, o))
    return {
        f"{at}.input_layernorm.weight": torch.ones_like(norm),
        f"{at}.self_attn.q_proj.weight": q.flatten(0, 2),
        f"{at}.self_attn.k_proj.weight": k[order].flatten(0, 1),
        f"{at}.self_attn.v_proj.weight": v[order].flatten(0, 1),
        f"{at}.self_attn.o_proj.weight": o.flatten(0, 1).movedim(0, 1).flatten(1),
    }


def mlp(read: Read, at: str, stream: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The three matrices of one layer's neurons."""
    norm = read(f"{at}.post_attention_layernorm.weight")
    gate, up = (read(f"{at}.mlp.{name}_proj.weight") * norm @ stream.T for name in ("gate", "up"))
    down = stream @ read(f"{at}.mlp.down_proj.weight")
    order, size = torch.randperm(len(up), generator=generator), positive(len(up), generator)
    return {
        f"{at}.post_attention_layernorm.weight": torch.ones_like(norm),
        f"{at}.mlp.gate_proj.weight": gate[order],
        f"{at}.mlp.up_proj.weight": (up * size[:, None])[order],
        f"{at}.mlp.down_proj.weight": (down / size)[:, order],
    }


def scramble(model: Path, out: Path, seed: int = 0) -> None:
    """Write a scrambled copy of the Llama in the folder `model`."""
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((model / "config.json").read_text("utf-8"))
    files = {}
    for file in model.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            files.update(dict.fromkeys(opened.keys(), file))

    def read(name: str) -> Tensor:
        with safe_open(files[name], "pt") as opened:
            return opened.get_tensor(name).double()

    embedding, norm = "model.embed_tokens.weight", read("model.norm.weight")
    stream = rotation(len(norm), generator)
    head = "lm_head.weight" if "lm_head.weight" in files else embedding
    with safe_open(files[embedding], "pt") as opened:
        dtype = opened.get_tensor(embedding).dtype
    made = {
        embedding: (read(embedding) @ stream.T).to(dtype),
        "model.norm.weight": torch.ones_like(norm, dtype=dtype),
        "lm_head.weight": (read(head) * norm @ stream.T).to(dtype),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        moved = {**attention(read, at, config, stream, generator), **mlp(read, at, stream, generator)}
        made.update({name: tensor.to(dtype).contiguous() for name, tensor in moved.items()})
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix == ".json" and "safetensors" not in file.name:
            (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2), "utf-8")
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    scramble(given.model, given.out, given.seed)


if __name__ == "__main__":
    main()
