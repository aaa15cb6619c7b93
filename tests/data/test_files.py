# SPDX-License-Identifier: Apache-2.0
"""Data files: what is read is what was written, and every bad file ends in one sentence."""

import gzip
import json
from pathlib import Path

import pytest

from onebasin.data.files import read_rows, read_sentences, read_text

ROWS = [{"text": "one, two", "label": "a"}, {"text": 'a "quoted"\u2028word', "label": "b"}]
CONLL = "-DOCSTART- -X- O\n\nNadim NNP I-PER\nleft VB O\n\n\nSoon RB O"


def jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_jsonl_rows(tmp_path: Path, name: str) -> None:
    assert read_rows(write(tmp_path, name, jsonl(ROWS)), ("text", "label")) == ROWS


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_csv_rows(tmp_path: Path, name: str) -> None:
    text = 'text,label\n"one, two",a\n"two\nlines",b\n'
    expected = [{"text": "one, two", "label": "a"}, {"text": "two\nlines", "label": "b"}]
    assert read_rows(write(tmp_path, name, text), ("text", "label")) == expected


@pytest.mark.parametrize("name", ["words.txt", "words.txt.gz"])
def test_conll_columns(tmp_path: Path, name: str) -> None:
    assert read_sentences(write(tmp_path, name, CONLL)) == [
        {"tokens": ["Nadim", "left"], "tags": ["I-PER", "O"]},
        {"tokens": ["Soon"], "tags": ["O"]},
    ]


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    assert read_text(write(tmp_path, "a.txt.gz", "a\r\nb\n")) == "a\r\nb\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.jsonl", "", "'.*rows.jsonl' is empty"),
        ("rows.csv", "text,label\n", "has a header but no rows"),
        ("rows.jsonl", '{"text": "a"}\n', "row 1 of '.*' lacks the column 'label'; it has the column 'text'"),
        ("rows.csv", "text\na\n", "row 1 of '.*' lacks the column 'label'; it has the column 'text'"),
        ("rows.csv", "text,label\na\n", "row 1 of '.*' lacks the column 'label'"),
        ("rows.jsonl", '{"text": "a", "label": 1}\n{"text"\n', "line 2 of '.*' is not valid JSON"),
        ("rows.jsonl", "[1]\n", "line 1 of '.*' is not a JSON object"),
        ("rows.txt", "some text", "needs a .jsonl or .csv file with the columns 'text', 'label'"),
        ("rows.parquet", "some text", "cannot read the data file '.*rows.parquet'"),
        ("rows.xml", "some text", r"is none of .txt, .jsonl, .csv \(or these with .gz\) and .parquet"),
    ],
)
def test_bad_rows(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_rows(write(tmp_path, name, content), ("text", "label"))


def test_missing_damaged_and_binary_files(tmp_path: Path) -> None:
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress(b"some text" * 100)[:30])
    fake = tmp_path / "fake.txt.gz"
    fake.write_bytes(b"not compressed")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.txt", cut, fake, binary, tmp_path):
        with pytest.raises(ValueError, match="cannot read the data file") as error:
            read_text(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_bad_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2 of '.*' has one column"):
        read_sentences(write(tmp_path, "a.txt", "one O\ntwo\n"))
    with pytest.raises(ValueError, match=r"row 1 of '.*' needs lists 'tokens' and 'tags' of one length"):
        read_sentences(write(tmp_path, "a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}\n'))
