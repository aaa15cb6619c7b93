# SPDX-License-Identifier: Apache-2.0
"""Train small language models on one text from different seeds: Llamas, whose keys and values are shared, or GPT-2s.

    python examples/character_models.py TEXT[.gz] -o llamas

Character level: the distinct characters of the whole text, sorted, are the vocabulary (`chars.json` in each folder).
The first 90 % of the text train, the last 10 % are `onebasin`'s validation split. What comes out are ordinary
`LlamaForCausalLM` or `GPT2LMHeadModel` folders for every command, for example

    onebasin barrier llamas/model-0 llamas/model-1 -o line --match full --task causal-lm --data TEXT \\
        --vocabulary llamas/model-0/chars.json --context 64 --limit 256
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from onebasin.data import evaluate, load_task
from onebasin.data.files import read_text
from onebasin.data.text import character_vocabulary, encode, part

CONTEXT = 64
BATCH = 32
LEARNING_RATE = 2e-3


def llama(characters: int, width: int, layers: int) -> PreTrainedModel:
    """4 query heads for 2 key and value heads, SwiGLU, a head of its own."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=characters,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def gpt2(characters: int, width: int, layers: int) -> PreTrainedModel:
    """4 heads, a tied head, no dropout."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=characters,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
            **dropout,
        )
    )


FAMILIES = {"llama": llama, "gpt2": gpt2}


def train(ids: Tensor, make: Callable[[], PreTrainedModel], seed: int, steps: int) -> PreTrainedModel:
    """AdamW, one cycle of the learning rate; initial weights and the order of the text from `seed`."""
    torch.manual_seed(seed)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH, 1))
        batch = ids[starts + torch.arange(CONTEXT + 1)]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"seed {seed}, step {step} of {steps}: training loss {loss.item():.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("llamas"))
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=2500)
    given = parser.parse_args()

    text = read_text(given.text)
    vocabulary = character_vocabulary(text)
    ids = torch.tensor(encode(part(text, "train"), vocabulary))
    make = partial(FAMILIES[given.family], len(vocabulary), given.width, given.layers)
    for seed in given.seeds:
        folder = given.output / f"model-{seed}"
        model = train(ids, make, seed, given.steps)
        model.save_pretrained(folder)
        (folder / "chars.json").write_text(json.dumps(vocabulary) + "\n", "utf-8")
        task = load_task("causal-lm", given.text, folder, vocabulary=vocabulary, context=CONTEXT, limit=256)
        scores = evaluate(model, task)
        print(f"{folder}: validation loss {scores.loss:.4f}, accuracy {scores.accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
