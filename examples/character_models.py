# SPDX-License-Identifier: Apache-2.0
"""Train small language models on one text from different seeds: Llamas, GPT-2s, or others.

    python examples/character_models.py TEXT[.gz] -o llamas
    python examples/character_models.py TEXT[.gz] -o gpt2s --family gpt2 --width 256 --layers 6 --bfloat16

Character level: the distinct characters of the whole text, sorted, are the vocabulary (`chars.json` in each folder).
The first 90 % of the text train, the last 10 % are `onebasin`'s validation split. The same command continues a run that
was stopped, to the same weights: each model in training keeps its state beside its folder (`model-0.training.pt`).
Seeds whose folders are there already are left alone. The family is gpt2, or any type of causal model whose
configuration takes Llama's names for its sizes (qwen3, gemma2, olmo2, gpt_neox, ...). What comes out are ordinary
folders for every command, for example

    onebasin barrier llamas/model-0 llamas/model-1 -o line --match full --task causal-lm --data TEXT \\
        --vocabulary llamas/model-0/chars.json --context 64 --limit 256
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import resumable
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from onebasin.data import evaluate, load_task
from onebasin.data.files import read_text
from onebasin.data.text import character_vocabulary, encode, part

CONTEXT = 64
BATCH = 32


def like_llama(family: str, characters: int, width: int, layers: int) -> PreTrainedModel:
    """4 query heads, where the type shares them for 2 key and value heads, a head of its own."""
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family,
            vocab_size=characters,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
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


@dataclass(frozen=True)
class Training:
    """What a run depends on; one with other settings does not continue it."""

    family: str
    width: int
    layers: int
    seed: int
    steps: int
    bfloat16: bool
    lr: float = 2e-3
    weight_decay: float = resumable.WEIGHT_DECAY


def train(ids: Tensor, characters: int, how: Training, kept: Path, every: int = 100) -> PreTrainedModel:
    """Train a model; its state is put into the file `kept` every so many steps, and a stopped run continues from it."""

    def loss_of(model: PreTrainedModel) -> Tensor:
        batch = ids[torch.randint(len(ids) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def new_model() -> PreTrainedModel:
        if how.family == "gpt2":
            return gpt2(characters, how.width, how.layers)
        return like_llama(how.family, characters, how.width, how.layers)

    return resumable.train(new_model, loss_of, kept, asdict(how), how.lr, every, how.weight_decay)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("llamas"))
    parser.add_argument("--family", default="llama", help="a type of causal model, such as gpt2 or qwen3")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=Training.lr, help="the largest learning rate")
    parser.add_argument("--weight-decay", type=float, default=Training.weight_decay)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, about twice as fast on new CPUs")
    given = parser.parse_args()
    if given.bfloat16:
        resumable.warn_of_slow_bfloat16()

    text = read_text(given.text)
    vocabulary = character_vocabulary(text)
    ids = torch.tensor(encode(part(text, "train"), vocabulary))
    given.output.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        folder, kept = given.output / f"model-{seed}", given.output / f"model-{seed}.training.pt"
        if (folder / "chars.json").exists() and not kept.exists():
            print(f"{folder}: is there already", flush=True)
            continue
        how = Training(
            given.family, given.width, given.layers, seed, given.steps, given.bfloat16, given.lr, given.weight_decay
        )
        model = train(ids, len(vocabulary), how, kept)
        model.save_pretrained(folder)
        (folder / "chars.json").write_text(json.dumps(vocabulary) + "\n", "utf-8")
        kept.unlink(missing_ok=True)
        task = load_task("causal-lm", given.text, folder, vocabulary=vocabulary, context=CONTEXT, limit=256)
        scores = evaluate(model, task)
        print(f"{folder}: validation loss {scores.loss:.4f}, accuracy {scores.accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
