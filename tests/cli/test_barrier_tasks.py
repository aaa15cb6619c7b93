# SPDX-License-Identifier: Apache-2.0
"""`onebasin barrier` on every task of texts, with the options that choose the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo import GPT2, TEXT, build, save

pytestmark = pytest.mark.usefixtures("three_sweeps")

WORDS = ["[PAD]", "[UNK]", "[MASK]", *"abcdefghij"]
KINDS = {
    "causal-lm": ("GPT2LMHeadModel", GPT2),
    "masked-lm": ("BertForMaskedLM", TEXT),
    "text-classification": ("BertForSequenceClassification", TEXT),
    "token-classification": ("BertForTokenClassification", TEXT),
}


def pair(folder: Path, task: str) -> tuple[Path, Path]:
    """Two models whose tokenizer knows ten letters. The second has the first one's numbers, in another place."""
    kind, config = KINDS[task]
    ends = []
    for number in range(2):
        model = build(kind, **config)
        for parameter in model.parameters():
            parameter.data = parameter.data.roll(number)
        ends.append(save(model, folder / str(number)))
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", mask_token="[MASK]")
        tokenizer.save_pretrained(ends[-1])
    return ends[0], ends[1]


def data(folder: Path, task: str) -> list[Any]:
    """A file for the task, and the options that choose from it."""
    (folder / "chars.json").write_text(json.dumps({letter: 3 + i for i, letter in enumerate("abcdefghij")}))
    if task.endswith("lm"):
        (folder / "text.txt").write_text("abcdefghij" * 60)
        chosen = ["--vocabulary", folder / "chars.json", "--context", 6, "--limit", 4, "--split", "all"]
        return [folder / "text.txt", *chosen, *(["--mask-id", 2] if task == "masked-lm" else [])]
    if task == "text-classification":
        rows = [json.dumps({"text": "a b c d e"[: 1 + 2 * i], "label": i % 3}) for i in range(5)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        return [folder / "rows.jsonl", "--limit", 4, "--context", 3]
    rows = [json.dumps({"tokens": list("abcd"), "tags": [0, 1, 2, 0]}) for _ in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return [folder / "rows.jsonl", "--limit", 2]


@pytest.mark.parametrize(
    ("task", "level"),
    [("causal-lm", "none"), ("causal-lm", "full"), ("masked-lm", "full"), ("text-classification", "none"),
     ("token-classification", "full")],
)  # fmt: skip
def test_the_ends_of_the_line_are_the_models(ask: Any, tmp_path: Path, task: str, level: str) -> None:
    """Matched or not, both ends have the losses that `evaluate` measures on the same examples."""
    ends = pair(tmp_path, task)
    chosen = ["--task", task, "--data", *data(tmp_path, task)]
    scores = ask("evaluate", *ends, *chosen)["results"]
    found = ask("barrier", *ends, *chosen, "--points", 3, "--match", level, "-o", tmp_path / "out")
    assert found["lambdas"] == [0, 0.5, 1] and len(found["accuracies"]) == 3
    assert found["end_losses"] == pytest.approx([score["loss"] for score in scores], rel=1e-4)
    assert found["barrier"] == pytest.approx(max(0.0, found["losses"][1] - sum(found["end_losses"]) / 2), abs=1e-6)
