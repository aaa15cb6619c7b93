# SPDX-License-Identifier: Apache-2.0
"""The model card is what the hub reads; the record names its inputs exactly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from damage import edit_weights
from huggingface_hub import ModelCard

from onebasin.models import Folder, distances, model_card, provenance, write_model
from onebasin.settings import OutputSettings

COMMAND = "onebasin match a b -o out"


@pytest.fixture
def pair(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Folder, Folder]:
    make(name="a"), make(name="b")
    edit_weights(tmp_path / "b", lambda t: [value.mul_(1.25) for value in t.values()])
    monkeypatch.chdir(tmp_path)
    return Folder("a"), Folder("b")


def test_the_card_is_one_that_the_hub_reads(pair: tuple[Folder, Folder], tmp_path: Path) -> None:
    far, near = distances(*pair), distances(pair[1], pair[1])
    for result, kind, times in (
        ({"output": "x/out"}, "match", 1),
        ({"output": "x/out", "method": "average"}, "merge", 2),
    ):
        text = model_card(pair, command=COMMAND, result=result, before=[far] * times, after=[near] * times)
        card = ModelCard(text)
        assert card.data.base_model == ["a", "b"]
        assert card.data.library_name == "transformers"
        assert card.data.tags == ["onebasin", kind]
        assert "# out\n" in card.text and f"```sh\n{COMMAND}\n```" in card.text
        assert card.text.count(f"whole | {far.distance:.6g} | 0 |") == times
        assert card.text.count(f"attention | {far.parts['attention']:.6g} | 0 |") == times
        assert str(tmp_path) not in text


@pytest.mark.parametrize("name", ["o/n", "we: ird", "- x", '"q"', "ümlaut", "# no", "a\\b"])
def test_names_survive_the_front_matter(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(name=name)
    text = model_card([Folder(name)], command=COMMAND, result={"output": None})
    assert ModelCard(text).data.base_model == [Path(name).name]


def test_the_record(pair: tuple[Folder, Folder], tmp_path: Path) -> None:
    far, near = distances(*pair), distances(pair[0], pair[0])
    options = {
        "symmetry": "paper",
        "parts": {"ffn", "attention"},
        "layers": (1, 0),
        "file": Path("f"),
        "rate": 0.5,
        "none": None,
    }
    result = {"output": "out", "anchor": 0, "weights": [0.5, 0.5]}
    record = provenance(pair, command=COMMAND, options=options, result=result, before=[far], after=[near])
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record
    assert str(tmp_path) not in text
    assert record["options"] == {
        "symmetry": "paper",
        "parts": ["attention", "ffn"],
        "layers": [1, 0],
        "file": "f",
        "rate": 0.5,
        "none": None,
    }
    assert record["result"] == result
    assert set(record["versions"]) == {"onebasin", "torch", "transformers", "python"}
    assert record["versions"]["torch"] == str(torch.__version__)
    assert record["distances"][0]["before"]["layers"].keys() == {"0", "1"}
    assert record["distances"][0]["before"]["distance"] == far.distance
    for given, name in zip(record["inputs"], "ab", strict=True):
        assert given["model"] == name
        expected = {
            file: hashlib.sha256((tmp_path / name / file).read_bytes()).hexdigest()
            for file in ("config.json", "model.safetensors")
        }
        assert given["sha256"] == expected


def test_every_shard_is_hashed(pair: tuple[Folder, Folder]) -> None:
    like = pair[0]
    write_model(
        "shards", ((name, like.read_name(name)) for name in like.files), like, look=OutputSettings(shard_size=3000)
    )
    record = provenance([Folder("shards")], command=COMMAND, options={}, result={})
    shards = {path.name for path in Path("shards").glob("*.safetensors")}
    assert len(shards) > 1
    assert set(record["inputs"][0]["sha256"]) == {*shards, "config.json"}
