# SPDX-License-Identifier: Apache-2.0
"""Running text: vocabularies, splits, sequences, and the built-in text."""

import json
import subprocess
import sys
import zlib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebasin.data.text import character_vocabulary, encode, part, read_vocabulary, sequences, stdlib_text
from onebasin.settings import Context, checked


@given(st.text(min_size=1))
def test_a_vocabulary_of_the_text_encodes_it_back(text: str) -> None:
    vocabulary = character_vocabulary(text)
    back = {index: character for character, index in vocabulary.items()}
    assert sorted(back) == list(range(len(set(text))))
    assert "".join(back[index] for index in encode(text, vocabulary)) == text


@given(st.text())
def test_train_and_validation_make_up_the_whole(text: str) -> None:
    assert part(text, "train") + part(text, "validation") == part(text, "all") == text


def test_the_split_is_nine_to_one() -> None:
    assert len(part("x" * 1000, "train")) == 900


@given(st.lists(st.integers(0, 9), min_size=5, max_size=60), st.integers(2, 5))
def test_sequences_are_the_text_in_order(ids: list[int], context: int) -> None:
    cut = sequences(ids, context)
    assert {len(one) for one in cut} == {context}
    assert list(chain.from_iterable(cut)) == ids[: len(ids) - len(ids) % context]


def test_vocabulary_files(tmp_path: Path) -> None:
    file = tmp_path / "chars.json"
    file.write_text(json.dumps(["a", "b", "é"]))
    assert read_vocabulary(file) == {"a": 0, "b": 1, "é": 2}
    file.write_text(json.dumps({"b": 4, "a": 0}))
    assert read_vocabulary(file) == {"b": 4, "a": 0}


@pytest.mark.parametrize(
    "content", ['{"ab": 1}', '{"a": "1"}', '{"a": -1}', '{"a": true}', "3", '["a", 1]', "[]x", '["ab"]']
)
def test_bad_vocabularies(tmp_path: Path, content: str) -> None:
    file = tmp_path / "chars.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"the vocabulary '.*chars.json'"):
        read_vocabulary(file)


def test_bad_text() -> None:
    with pytest.raises(ValueError, match=r"no vocabulary 'nowhere.json'|the vocabulary 'nowhere.json'"):
        read_vocabulary("nowhere.json")
    with pytest.raises(ValueError, match="2 characters that the vocabulary lacks: 'x', 'y'"):
        encode("xayx", {"a": 0})
    with pytest.raises(ValueError, match="no split 'test'; choose from train, validation, all"):
        part("abc", "test")
    with pytest.raises(ValueError, match="3 tokens, fewer than one sequence of 4"):
        sequences([1, 2, 3], 4)
    with pytest.raises(ValueError, match="context 1: it must be"):  # one token leaves nothing to predict
        checked(Context, "context", 1)


def test_stdlib_text_is_the_same_in_another_process() -> None:
    file = stdlib_text.__wrapped__.__code__.co_filename  # alone, without the packages that it lives among
    code = f"import runpy, zlib; print(zlib.crc32(runpy.run_path({file!r})['stdlib_text']().encode()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == zlib.crc32(stdlib_text().encode())


def test_stdlib_text_has_only_the_most_frequent_characters() -> None:
    whole, small = stdlib_text(100_000), stdlib_text(20)
    assert "def dumps(" in whole
    ranked = Counter(whole).most_common(21)
    assert set(small) == {character for character, _ in ranked[:20]}
    assert "".join(filter(set(small).__contains__, whole)) == small
