# SPDX-License-Identifier: Apache-2.0
"""One example is enough for whatever measures on data; wrong data end in one line wherever they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairs import folders, weights

pytestmark = pytest.mark.usefixtures("three_sweeps")

ROW = {"input_ids": [3, 7, 5, 11]}


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return folders(tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    return file


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "fisher"],
        ["--method", "fisher", "--labels", "given"],
        ["--method", "regmean"],
        ["--method", "ot", "--ground", "acts"],
        ["--method", "ot", "--ground", "acts", "--residual", "weighted", "--entropy", 0.1],
        ["--match", "full", "--match-with", "activations"],
    ],
    ids=lambda words: "-".join(map(str, words)),
)
def test_a_single_example(ask, models, one, tmp_path, words):
    words = [*(["--match", "none"] if "--match" not in words else []), *words]
    ask("merge", *models, "-o", tmp_path / "merged", "--data", one, *words)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "merged").values())
    found = ask("evaluate", tmp_path / "merged", "--task", "causal-lm", "--data", one)["results"][0]
    assert found["loss"] > 0


@pytest.mark.parametrize(
    ("name", "content", "words", "line"),
    [
        ("rows.jsonl", "", [], "is empty"),
        ("rows.jsonl", "\n\n", [], "is empty"),
        ("rows.jsonl", "[" * 100_000, [], "is not valid JSON"),
        ("rows.jsonl", '{"words": "a"}\n', [], "has no text in the column 'text'"),
        ("rows.jsonl", '{"input_ids": []}\n', [], "has no list of token ids"),
        ("rows.jsonl", '{"input_ids": [99]}\n', [], "token id 99, but the model's vocabulary has 23"),
        ("rows.jsonl", '{"input_ids": [1, 2]}\n', ["--columns", "text"], "write OURS=THEIRS"),
        ("rows.xyz", "a\n", [], "is none of .txt, .jsonl"),
    ],
)
def test_wrong_calibration_data(refused, models, tmp_path, name, content, words, line):
    (tmp_path / name).write_text(content)
    given = ["--data", tmp_path / name, "--task", "causal-lm", *words]
    for command in (
        ["statistics", models[0], "-o", tmp_path / "out"],
        ["merge", *models, "-o", tmp_path / "out", "--match", "none", "--method", "regmean"],
        ["match", *models, "-o", tmp_path / "out", "--match-with", "activations"],
    ):
        assert line in refused(*command, *given)


def test_an_example_of_padding_alone(models, tmp_path):
    """No file can say so, but a batch from Python can."""
    import torch

    from onebasin.data import Task, evaluate
    from onebasin.fusion.fisher import fisher_diagonal
    from onebasin.fusion.regmean import input_grams
    from onebasin.models import Folder
    from onebasin.running import loaded_model

    stock = loaded_model(Folder(models[0]))
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}
    for measure in (fisher_diagonal, input_grams):
        with pytest.raises(ValueError, match="an example consists of padding alone; leave it out"):
            measure(stock, [batch])
    task = Task("causal-lm", ({**batch, "labels": torch.full((1, 4), -100)},))
    with pytest.raises(ValueError, match="leave nothing to predict"):
        evaluate(stock.model, task)
