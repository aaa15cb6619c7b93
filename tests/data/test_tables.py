# SPDX-License-Identifier: Apache-2.0
"""Parquet, image folders and datasets: what is read is what was written, and bad ones end in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebasin.data.files import kind, read_rows
from onebasin.data.tables import Class, table_kind

datasets = pytest.importorskip("datasets")
ROWS = [{"sentence": "one", "label": 1}, {"sentence": "two", "label": 0}, {"sentence": "three", "label": 1}]


def dataset() -> datasets.Dataset:
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"sentence": datasets.Value("string"), "label": label})
    return datasets.Dataset.from_list(ROWS, features=features)


def test_parquet_rows_and_renamed_columns(tmp_path: Path) -> None:
    dataset().to_parquet(tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet", ("sentence", "label")) == ROWS
    renamed = read_rows(tmp_path / "rows.parquet", ("text",), limit=2, renamed={"text": "sentence"})
    assert [row["text"] for row in renamed] == ["one", "two"]
    with pytest.raises(ValueError, match="no column 'words' to read as 'text'; it has the columns 'sentence', 'label'"):
        read_rows(tmp_path / "rows.parquet", ("text",), renamed={"text": "words"})
    with pytest.raises(ValueError, match="is taken whole; give the file of the split"):
        read_rows(tmp_path / "rows.parquet", (), split="test")


def test_a_folder_of_the_datasets_library_with_and_without_splits(tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "whole")
    whole = read_rows(tmp_path / "whole", ("sentence", "label"))
    assert [row["label"] for row in whole] == [Class(1, "good"), Class(0, "bad"), Class(1, "good")]
    parts = datasets.DatasetDict({"train": dataset(), "validation": dataset().select([1])})
    parts.save_to_disk(tmp_path / "parts")
    assert len(read_rows(tmp_path / "parts", ())) == 1  # validation, since there is no test
    assert len(read_rows(tmp_path / "parts", (), split="train", limit=2)) == 2
    with pytest.raises(ValueError, match="has no split 'test'; choose from train, validation"):
        read_rows(tmp_path / "parts", (), split="test")


def test_sequences_of_numbered_tags_get_their_names(tmp_path: Path) -> None:
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags})
    rows = [{"tokens": ["a", "b"], "ner_tags": [0, 1]}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "d")
    row = read_rows(tmp_path / "d", ("tokens", "tags"), renamed={"tags": "ner_tags"})[0]
    assert (row["tokens"], row["tags"]) == (["a", "b"], [Class(0, "O"), Class(1, "B-PER")])


def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [row["text"] for row in read_rows(tmp_path / "d", ("text",), split="train")] == ["a", "b"]


def test_image_folders_have_a_class_in_every_subfolder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, count in (("cat", 1), ("dog", 3)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(count):
            image.new("L", (2, 2)).save(tmp_path / "pictures" / name / f"{number}.png")
    (tmp_path / "pictures" / "notes").mkdir()
    rows = read_rows(tmp_path / "pictures", ("image", "label"))
    assert [row["label"] for row in rows] == ["cat", "dog", "dog", "dog"]
    assert all((tmp_path / "pictures" / row["image"]).is_file() for row in rows)
    with pytest.raises(ValueError, match="is taken whole; give the folder of the split"):
        read_rows(tmp_path / "pictures", (), split="test")


def test_kinds_of_names() -> None:
    assert table_kind("owner/name") == table_kind("owner/name:config") == kind("nyu-mll/glue:sst2") == "hub"
    assert [table_kind(name) for name in ("owner/name.csv", "a/b/c", "name", "builtin:digits")] == [None] * 4


def test_bad_tables_end_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"broken")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    files = [tmp_path / name for name in ("broken.parquet", "none.parquet", "empty")]
    for data in (*files, "no-such-owner/no-such-set"):
        with pytest.raises(ValueError, match="cannot read the data") as error:
            read_rows(data, ())
        assert str(data) in str(error.value) and "\n" not in str(error.value)
    dataset().select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(tmp_path / "none.parquet", ())
