# SPDX-License-Identifier: Apache-2.0
"""Metrics by hand on small examples; tasks that report them; data that leave something undefined."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tasks import SENTENCES, SMALL, TEXTS, jsonl, tokenizer
from zoo import CASES, build, save

from onebasin.data import evaluate, load_model, load_task
from onebasin.data.metrics import of_classes, of_entities, of_numbers


def bert(kind: str, path: Path, **config: Any) -> Path:
    save(build(kind, **{**SMALL, **config}), path)
    tokenizer().save_pretrained(path)
    return path


def test_classes_by_hand() -> None:
    """Confusion (right, predicted): 0: 2 of 3, 1: 1 of 1, 2 (one example) never predicted."""
    found = of_classes([0, 0, 1, 1, 0], [0, 0, 0, 1, 2])
    precision, recall = (2 / 3, 1 / 2, 0), (2 / 3, 1, 0)
    f1 = [2 * p * r / (p + r) if p + r else 0 for p, r in zip(precision, recall, strict=True)]
    assert found["macro_f1"] == pytest.approx(sum(f1) / 3)
    assert found["micro_f1"] == pytest.approx(3 / 5)
    # Gorodkin's R_K: (c s - sum p t) / sqrt((s^2 - sum p^2) (s^2 - sum t^2)), p and t how often predicted and right
    assert found["matthews"] == pytest.approx((3 * 5 - (3 * 3 + 2 * 1 + 0 * 1)) / math.sqrt((25 - 13) * (25 - 11)))


def test_entities_by_hand() -> None:
    """Two of three entities found, with the right bounds and type; one more is invented; IOB1 and IOB2 alike."""
    right = [["B-PER", "I-PER", "O", "I-LOC"], ["O", "B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O"]]
    assert of_entities(predicted, right)["entity_f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert of_entities([["X"]], [["O"]]) == {}


def test_correlations_by_hand() -> None:
    found = of_numbers([1.0, 2.0, 10.0], [3.0, 1.0, 2.0])
    assert found["spearman"] == pytest.approx(-0.5)  # ranks 1 2 3 against 3 1 2
    assert found["pearson"] == pytest.approx(torch.corrcoef(torch.tensor([[1.0, 2, 10], [3, 1, 2]]))[0, 1].item())
    assert of_numbers([1.0], [2.0]) == {} and of_numbers([1.0, 1.0], [2.0, 3.0]) == {}


def test_a_regression(tmp_path: Path) -> None:
    path = bert("BertForSequenceClassification", tmp_path / "model", num_labels=1)
    rows = [{"text": text, "text_pair": "j", "label": 0.5 * i} for i, text in enumerate(TEXTS)]
    model = load_model(path, "text-regression")
    scores = evaluate(model, load_task("text-regression", jsonl(tmp_path / "rows.jsonl", rows), path, batch=3))
    outputs = [float(model(**tokenizer()(text, "j", return_tensors="pt")).logits.detach()) for text in TEXTS]
    assert scores.loss == pytest.approx(sum((y - 0.5 * i) ** 2 for i, y in enumerate(outputs)) / 4, rel=1e-4)
    ranks = torch.tensor(outputs).argsort().argsort().double()
    expected = torch.corrcoef(torch.stack([ranks, torch.arange(4.0)]))[0, 1]
    assert scores.spearman == pytest.approx(float(expected), rel=1e-4)
    assert math.isnan(scores.accuracy)
    one = evaluate(model, load_task("text-regression", tmp_path / "rows.jsonl", path, limit=1))
    with pytest.raises(ValueError, match="no metric 'spearman'; choose from loss, accuracy"):
        _ = one.spearman
    with pytest.raises(ValueError, match="needs a model with one output, and this one has 3"):
        other = bert("BertForSequenceClassification", tmp_path / "classes", num_labels=3)
        load_task("text-regression", tmp_path / "rows.jsonl", other)
    with pytest.raises(ValueError, match=r"the label 'x' in row 1 of '.*' is no number"):
        load_task("text-regression", jsonl(tmp_path / "x.jsonl", [{"text": "a", "label": "x"}]), path)


@pytest.mark.parametrize("limit", [1, None])
def test_batches_by_length_change_nothing_but_the_order(tmp_path: Path, limit: int | None) -> None:
    tags = {0: "O", 1: "B-X", 2: "I-X"}
    path = bert("BertForTokenClassification", tmp_path / "model", id2label=tags)
    rows = [{**row, "tags": [{"O": "O", "X": "B-X", "Y": "I-X"}[tag] for tag in row["tags"]]} for row in SENTENCES * 3]
    cut = [{key: value[: 1 + i % 3] for key, value in row.items()} for i, row in enumerate(rows)]
    data = jsonl(tmp_path / "rows.jsonl", cut)
    model = load_model(path, "token-classification")
    how = dict(batch=2, limit=limit)
    plain, sorted_ = (load_task("token-classification", data, path, **how, by_length=b) for b in (False, True))
    one, two = evaluate(model, plain), evaluate(model, sorted_)
    assert two.loss == pytest.approx(one.loss, rel=1e-5) and two.accuracy == one.accuracy
    assert two.metrics == pytest.approx(one.metrics)
    assert {"macro_f1", "micro_f1", "matthews", "entity_f1"} <= one.metrics.keys()
    padding = [sum(int((b["input_ids"] == 0).sum()) for b in task.batches) for task in (plain, sorted_)]
    assert padding[1] <= padding[0] and (limit or padding[1] < padding[0])


def test_perplexity_and_classes_of_one_example(tmp_path: Path) -> None:
    path = save(CASES["GPT2LMHeadModel"](), tmp_path / "model")
    data = jsonl(tmp_path / "rows.jsonl", [{"input_ids": [3, 4, 5]}])
    scores = evaluate(load_model(path, "causal-lm"), load_task("causal-lm", data, path))
    assert scores.perplexity == pytest.approx(math.exp(scores.loss))
    with pytest.raises(ValueError, match="no metric 'macro_f1'"):
        _ = scores.macro_f1
    path = bert("BertForSequenceClassification", tmp_path / "bert", num_labels=3)
    one = jsonl(tmp_path / "one.jsonl", [{"text": "a", "label": 1}])
    scores = evaluate(load_model(path, "text-classification"), load_task("text-classification", one, path))
    assert scores.accuracy in (0.0, 1.0) and scores.macro_f1 == scores.accuracy


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    path = bert("BertForSequenceClassification", tmp_path / "model", vocab_size=9)
    data = jsonl(tmp_path / "rows.jsonl", [{"text": "a j", "label": 0}])
    with pytest.raises(ValueError, match="the data have token id 14, but the model's vocabulary has 9"):
        load_task("text-classification", data, path)


def test_an_example_without_tokens_is_told(tmp_path: Path) -> None:
    path = bert("BertForSequenceClassification", tmp_path / "model")
    plain = tokenizer()
    plain.backend_tokenizer.post_processor = None
    plain.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("z", "")
    plain.save_pretrained(path)
    data = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": 0}, {"text": "z", "label": 0}])
    with pytest.raises(ValueError, match=r"row 2 of '.*' has no tokens"):
        load_task("text-classification", data, path)
