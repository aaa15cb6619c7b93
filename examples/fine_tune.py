# SPDX-License-Identifier: Apache-2.0
"""Fine-tune an encoder on rows of text, small enough for two CPU cores, or train a smaller one from nothing.

    python examples/fine_tune.py ENCODER ROWS.jsonl[.gz] -o FOLDER --labels anger,fear,joy --seed 0
    python examples/fine_tune.py ENCODER ROWS.jsonl[.gz] -o FOLDER --labels anger,fear,joy --seed 0 --scratch 2x64
    python examples/fine_tune.py ENCODER ROWS.jsonl[.gz] -o FOLDER --labels anger,fear,joy --seed 0 --scratch 2x64 \\
        --family deberta-v2

ENCODER is a model folder or a hub id with a tokenizer; its head, if it has one, is replaced by a new one that is drawn
from the seed, which also orders the rows. With --scratch only its tokenizer and architecture are kept: all weights are
drawn from the seed, so that two seeds give models that have nothing in common but what they learn. With --family only
its tokenizer is kept. The written folder is an ordinary model folder, with `training.json` (what was trained, and the
seconds it took) beside the weights. The other examples and the studies start from such folders.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from onebasin.data import load_task

HEADS = {
    "text-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}

# Where released models of these families differ from the defaults of their configs; but for position buckets, of which
# DeBERTa V3 has 256, for longer texts.
FAMILIES: dict[str, dict[str, Any]] = {
    "roberta": {},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_buckets": 32,
        "position_biased_input": False,
    },
}


def fresh(
    encoder: str, labels: list[str], task: str, seed: int, scratch: str | None = None, family: str | None = None
) -> PreTrainedModel:
    """The encoder under a new head, drawn from `seed`; or, with `scratch` (layers x width), a new model of its kind, or
    of `family`."""
    config = AutoConfig.from_pretrained(encoder)
    if family:
        ids = {"vocab_size": config.vocab_size, "pad_token_id": config.pad_token_id}
        config = AutoConfig.for_model(family, **ids, type_vocab_size=1, **FAMILIES[family])
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    torch.manual_seed(seed)
    if scratch:
        layers, width = map(int, scratch.split("x"))
        config.update({"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width})
        config.update({"num_attention_heads": width // 16})
        drawn: PreTrainedModel = HEADS[task].from_config(config)
        return drawn
    model: PreTrainedModel = HEADS[task].from_pretrained(encoder, config=config, ignore_mismatched_sizes=True)
    return model


def train(model: PreTrainedModel, batches: list[dict[str, Any]], epochs: int, lr: float, seed: int) -> float:
    """AdamW with a linear warm-up over 6 % of the steps and a linear decay; returns the mean loss of the last epoch."""
    model.train()
    order, steps = random.Random(seed), epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    warm = max(1, round(0.06 * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in order.sample(batches, len(batches)):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder")
    parser.add_argument("rows")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--labels", required=True, help="all labels that a row may carry, in the order of their ids")
    parser.add_argument("--task", default="text-classification", choices=list(HEADS))
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many rows, a multiple of the batch")
    parser.add_argument("--limit", type=int, help="only the next so many rows")
    parser.add_argument("--context", type=int, default=48, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", metavar="LAYERSxWIDTH", help="train a new model of this size, heads 16 wide")
    parser.add_argument("--family", choices=FAMILIES, help="its type, with --scratch [default: the encoder's]")
    args = parser.parse_args()
    if args.family and not args.scratch:
        parser.error("--family needs --scratch: the weights of an encoder are of its own type")
    if args.skip % args.batch:
        parser.error(f"--skip {args.skip} is no multiple of --batch {args.batch}")

    started, output = time.perf_counter(), Path(args.output)
    model = fresh(args.encoder, args.labels.split(","), args.task, args.seed, args.scratch, args.family)
    model.save_pretrained(output)  # load_task reads labels and tokenizer from the folder
    AutoTokenizer.from_pretrained(args.encoder).save_pretrained(output)
    last = None if args.limit is None else args.skip + args.limit
    task = load_task(args.task, args.rows, output, limit=last, batch=args.batch, context=args.context)
    loss = train(model, list(task.batches[args.skip // args.batch :]), args.epochs, args.lr, args.seed)
    model.save_pretrained(output)
    facts = {**vars(args), "loss": loss, "seconds": round(time.perf_counter() - started, 1)}
    (output / "training.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    print(f"{output}: loss {loss:.4f} in the last of {args.epochs} epochs, {facts['seconds']} s")


if __name__ == "__main__":
    main()
