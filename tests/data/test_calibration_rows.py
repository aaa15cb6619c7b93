# SPDX-License-Identifier: Apache-2.0
"""Calibration on classifiers' data shows the models what the task would, without the labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_tasks import SMALL, jsonl, tokenizer
from zoo import build, save

from onebasin.data.calibration import from_file


def bert(path: Path, kind: str = "SequenceClassification") -> Path:
    save(build(f"BertFor{kind}", **SMALL, id2label={0: "O", 1: "X", 2: "Y"}), path)
    tokenizer().save_pretrained(path)
    return path


def ids(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    """The tokens of every example, without padding."""
    return [[one for one in row if one] for batch in batches for row in batch["input_ids"].tolist()]


def test_sentences_in_conll_columns_are_words_without_their_tags(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", "TokenClassification")
    (tmp_path / "tags.txt").write_text("a X\nb O\n\nc Y\n")
    found = from_file(tmp_path / "tags.txt", model, "token-classification")
    assert ids(found) == [tokenizer()("a b")["input_ids"], tokenizer()("c")["input_ids"]]
    assert all("labels" not in batch for batch in found)
    tagged = [{"tokens": ["a", "b"], "tags": ["X", "O"]}, {"tokens": ["c"], "tags": ["Y"]}]
    rows = jsonl(tmp_path / "rows.jsonl", tagged)
    assert ids(from_file(rows, model, "token-classification")) == ids(found)
    plain = jsonl(tmp_path / "plain.jsonl", [{"text": "a b"}, {"text": "c"}])
    assert ids(from_file(plain, model, "token-classification")) == ids(found)


@pytest.mark.parametrize("task", ["text-classification", "text-regression"])
def test_both_texts_of_a_pair_are_shown(tmp_path: Path, task: str) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"one": "a b", "two": "c"}, {"one": "d", "two": "e"}])
    found = from_file(rows, bert(tmp_path / "model"), task, columns={"text": "one", "text_pair": "two"})
    assert ids(found) == [tokenizer()("a b", "c")["input_ids"], tokenizer()("d", "e")["input_ids"]]


def test_a_dataset_with_splits_is_read_from_its_training_part(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list([{"text": text}]) for name, text in (("test", "a"), ("train", "b"))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    found = from_file(tmp_path / "saved", bert(tmp_path / "model"), "text-classification")
    assert ids(found) == [tokenizer()("b")["input_ids"]]
