# SPDX-License-Identifier: Apache-2.0
"""`onebasin evaluate` on every kind of data, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo import IMAGE, build, save

WORDS = ["[PAD]", "[UNK]", *"abcdefghij"]
SMALL = dict(vocab_size=23, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=10)
PIXELS = dict(image_processor_type="ViTImageProcessor", do_resize=True, size={"height": 6, "width": 6}, do_rescale=True,
              rescale_factor=1 / 255, do_normalize=False)  # fmt: skip


def bert(path: Path, kind: str = "SequenceClassification", **config: Any) -> Path:
    save(build(f"BertFor{kind}", **{**SMALL, "num_labels": 3, **config}), path)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    return path


ROWS = [{"text": "a b c"[: 1 + 2 * (i % 3)], "label": i % 3} for i in range(7)]


def written(folder: Path, form: str) -> tuple[Path, list[str]]:
    """The same rows in another form, and what else the command must be told."""
    if form == "csv":
        (folder / "rows.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS))
        return folder / "rows.csv", []
    if form == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return folder / "rows.jsonl", []
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"sentence": row["text"], "class": row["label"]} for row in ROWS])
    named = ["--columns", "text=sentence,label=class"]
    if form == "parquet":
        made.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet", named
    datasets.DatasetDict({"test": made, "train": made.select([0])}).save_to_disk(folder / "saved")
    return folder / "saved", named


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
def test_every_form_of_the_same_rows_gives_the_same_scores(ask, tmp_path, form):
    model = bert(tmp_path / "model")
    (tmp_path / "csv").mkdir()
    file, _ = written(tmp_path / "csv", "csv")
    given = ["evaluate", model, model, "--task", "text-classification", "--data"]
    expected = ask(*given, file)
    other, named = written(tmp_path, form)
    found = ask(*given, other, *named)
    assert found["results"] == expected["results"] and len(found["results"]) == 2
    assert {"loss", "accuracy", "macro_f1", "micro_f1", "matthews"} <= found["results"][0].keys()


def test_a_table_for_people(run, tmp_path):
    model = bert(tmp_path / "model", num_labels=1)
    (tmp_path / "rows.csv").write_text("text,label\na,1.5\nb c,0\nd,2\n")
    shown = run("evaluate", model, "--task", "text-regression", "--data", tmp_path / "rows.csv")
    assert shown.exit_code == 0 and "spearman" in shown.stdout and "accuracy" not in shown.stdout


def test_conll_columns_and_image_folders(ask, tmp_path):
    model = bert(tmp_path / "model", "TokenClassification", id2label={0: "O", 1: "B-PER", 2: "I-PER"})
    (tmp_path / "tags.txt").write_text("a NN O\nb NN B-PER\n\nc NN B-PER\nd NN I-PER\n")
    found = ask("evaluate", model, "--task", "token-classification", "--data", tmp_path / "tags.txt")["results"][0]
    assert 0 <= found["entity_f1"] <= 1
    image = pytest.importorskip("PIL.Image")
    vit = save(build("ViTForImageClassification", **{**IMAGE, "num_channels": 3, "num_labels": 2},
                     id2label={0: "cat", 1: "dog"}), tmp_path / "vit")  # fmt: skip
    (vit / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        image.new("RGB", (8, 8), (shade, 0, 0)).save(tmp_path / "pictures" / name / "1.png")
    found = ask("evaluate", vit, "--task", "image-classification", "--data", tmp_path / "pictures")["results"][0]
    assert found["accuracy"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "content", "words", "line"),
    [
        ("rows.csv", "text,label\na,7\n", [], "unknown label '7' in row 1"),
        ("rows.csv", "text,label\n", [], "has a header but no rows"),
        ("rows.jsonl", "", [], "is empty"),
        ("rows.csv", "sentence,label\na,1\n", [], "lacks the column 'text'"),
        ("rows.csv", "text,label\na,1\n", ["--columns", "text"], "write OURS=THEIRS"),
        ("rows.csv", "text,label\na,1\n", ["--columns", "text=words"], "has no column 'words' to read as 'text'"),
        ("rows.csv", "text,label\na,1\n", ["--device", "nowhere"], "the device 'nowhere' is not available"),
        ("rows.csv", "text,label\n ,1\n", [], "has no text"),
    ],
)
def test_bad_data_end_in_one_line(refused, tmp_path, name, content, words, line):
    model = bert(tmp_path / "model")
    (tmp_path / name).write_text(content)
    assert line in refused("evaluate", model, "--task", "text-classification", "--data", tmp_path / name, *words)


def test_a_tokenizer_of_another_model_is_told(refused, tmp_path):
    model = bert(tmp_path / "model", vocab_size=5)
    (tmp_path / "rows.csv").write_text("text,label\na j,1\n")
    line = refused("evaluate", model, "--task", "text-classification", "--data", tmp_path / "rows.csv")
    assert "token id 11, but the model's vocabulary has 5" in line
