# SPDX-License-Identifier: Apache-2.0
"""Files of data: plain text, rows in JSONL or CSV, sentences in CoNLL columns, each also as `.gz`."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path

from .tables import Row, read_table, table_kind


def read_text(file: str | Path) -> str:
    """Return the text of a UTF-8 file, with its line ends unchanged. Raises ValueError for a file without text."""
    path = Path(file)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:  # a damaged .gz is an OSError or an EOFError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"cannot read the data file '{file}': {reason}") from None
    if not text.strip():
        raise ValueError(f"the data file '{file}' is empty")
    return text


def kind(file: str | Path) -> str:
    """Return `txt`, `jsonl` or `csv`, by the file's ending, or the kind of a table. Raises ValueError for anything
    else."""
    table = table_kind(file)
    if table is not None:
        return table
    ending = Path(str(file).removesuffix(".gz")).suffix
    kinds = {".txt": "txt", ".jsonl": "jsonl", ".csv": "csv"}
    if ending not in kinds:
        raise ValueError(
            f"'{file}' is none of .txt, .jsonl, .csv (or these with .gz) and .parquet, no folder, and no dataset of "
            "the hub (owner/name)"
        )
    return kinds[ending]


def split_off(data: str) -> tuple[str, str | None]:
    """`builtin:digits#train` -> the data and the split."""
    name, mark, split = data.rpartition("#")
    return (name, split) if mark else (data, None)


def read_rows(
    file: str | Path,
    columns: tuple[str, ...],
    *,
    split: str | None = None,
    limit: int | None = None,
    renamed: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return the rows of a JSONL or CSV file, or of a table.

    Args:
        file: The file or table.
        columns: That every row must have.
        split: Of datasets that have splits.
        limit: Only this many rows, from the first on.
        renamed: Our name of a column -> theirs.

    Raises:
        ValueError: The file cannot be read, or a column is missing.
    """
    form = kind(file)
    if form == "csv":
        rows: list[Row] = list(csv.DictReader(io.StringIO(read_text(file))))[:limit]
    elif form == "jsonl":
        lines = enumerate(read_text(file).split("\n"), 1)
        rows = [_object(file, number, line) for number, line in lines if line.strip()][:limit]
    elif form == "txt":
        raise ValueError(f"'{file}' is plain text; this task needs a .jsonl or .csv file with {_names(columns)}")
    else:
        rows = read_table(file, split, limit)
    if not rows:
        raise ValueError(f"the data file '{file}' has a header but no rows")
    theirs = dict(renamed or {})
    for ours, other in theirs.items():
        if other not in rows[0]:
            raise ValueError(f"'{file}' has no column '{other}' to read as '{ours}'; it has {_names(tuple(rows[0]))}")
    if theirs:
        kept = {name: name for name in rows[0] if name not in theirs} | theirs
        rows = [{ours: row.get(other) for ours, other in kept.items()} for row in rows]
    for number, row in enumerate(rows, 1):
        missing = tuple(name for name in columns if row.get(name) is None)
        if missing:
            raise ValueError(f"row {number} of '{file}' lacks {_names(missing)}; it has {_names(tuple(row))}")
    return rows


def read_sentences(
    file: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    renamed: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return sentences with `tokens` and `tags`: rows with these columns, or a text file in CoNLL columns.

    CoNLL: one token per line, columns separated by blanks, the tag last; an empty line ends a sentence.

    Args:
        file: The file or table.
        split: Of datasets that have splits.
        limit: Only this many sentences, from the first on.
        renamed: Our name of a column -> theirs.
    """
    if kind(file) != "txt":
        rows = read_rows(file, ("tokens", "tags"), split=split, limit=limit, renamed=renamed)
        for number, row in enumerate(rows, 1):
            lists = isinstance(row["tokens"], list) and isinstance(row["tags"], list)
            if not lists or len(row["tokens"]) != len(row["tags"]):
                raise ValueError(f"row {number} of '{file}' needs lists 'tokens' and 'tags' of one length")
        return rows
    rows, tokens, tags = [], [], []
    for number, line in enumerate([*read_text(file).split("\n"), ""], 1):
        fields = line.split()
        if len(fields) == 1:
            raise ValueError(f"line {number} of '{file}' has one column; CoNLL columns are a token, ..., its tag")
        if fields and fields[0] != "-DOCSTART-":
            tokens.append(fields[0])
            tags.append(fields[-1])
        elif tokens:
            rows.append({"tokens": tokens, "tags": tags})
            tokens, tags = [], []
    return rows[:limit]


def _object(file: str | Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} of '{file}' is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} of '{file}' is not a JSON object")
    return row


def _names(columns: tuple[str, ...]) -> str:
    return ("the columns " if len(columns) > 1 else "the column ") + ", ".join(f"'{name}'" for name in columns)
