# SPDX-License-Identifier: Apache-2.0
"""What a command would write is checked against what it reads, against itself, and against what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onebasin.models import Folder, ModelError
from onebasin.models.outputs import Output, refuse_outputs


@pytest.mark.parametrize("place", ["", " "])
def test_an_empty_name(place: str) -> None:
    with pytest.raises(ModelError, match="the path of the output is empty"):
        refuse_outputs([Output("the output", place)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_file_of_a_model_is_an_output_whatever_leads_there(bert: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "link").symlink_to(bert / "model.safetensors")
    (bert / "vocab.txt").write_text("a")
    for place in (bert / "model.safetensors", tmp_path / "link", bert / "config.json", bert / "vocab.txt",
                  tmp_path / "no" / ".." / bert.name / "config.json"):  # fmt: skip
        with pytest.raises(ModelError, match="is a file of the model"):
            refuse_outputs([Output("the alignment", place, "")], [Folder(bert)], overwrite)
    refuse_outputs([Output("the statistics", bert / "fisher.safetensors", "")], [Folder(bert)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_input_is_an_output_or_lies_in_one(bert: Path, tmp_path: Path, overwrite: bool) -> None:
    data = tmp_path / "data.txt"
    data.write_text("x")
    for output, given in ((Output("o", bert), Folder(bert)), (Output("o", data, ""), data),
                          (Output("o", tmp_path), Folder(bert)), (Output("o", tmp_path), data)):  # fmt: skip
        with pytest.raises(ModelError, match=r"is one of the inputs|contains an input"):
            refuse_outputs([output], [given], overwrite)
    refuse_outputs([Output("o", bert / "merged")], [Folder(bert)])  # a new folder beside a model's files


@pytest.mark.parametrize(
    "first, second",
    [("out", "out"), ("out", "out/inside"), ("out/inside", "out"), ("out", "./here/../out"), ("link", "there")],
)
def test_no_two_outputs_meet(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    outputs = [Output("the output", tmp_path / first), Output("the anchor's output", tmp_path / second)]
    with pytest.raises(ModelError, match=r"the anchor's output .* and the output .* are the same, or one is inside"):
        refuse_outputs(outputs, overwrite=True)


def test_what_exists_is_replaced_by_its_like_alone(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    file = tmp_path / "file"
    file.write_text("x")
    for output in (Output("o", bert), Output("o", file, ""), Output("o", tmp_path / "home")):
        with pytest.raises(ModelError, match="exists; choose another place or pass --overwrite"):
            refuse_outputs([output])
    for output in (Output("o", file), Output("o", bert, ""), Output("o", tmp_path / "home"), Output("o", bert, "x")):
        with pytest.raises(ModelError, match="so it is not overwritten"):
            refuse_outputs([output], overwrite=True)
    refuse_outputs([Output("o", bert), Output("p", file, "")], overwrite=True)
    refuse_outputs([Output("o", bert), Output("p", file, "")], own={bert, file})
    refuse_outputs([Output("o", file, "", grows=True)])


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="Not a directory"):
        refuse_outputs([Output("o", tmp_path / "file" / "deep" / "out")])
    os.symlink(tmp_path / "round", tmp_path / "round")
    with pytest.raises(ModelError, match="exists"):
        refuse_outputs([Output("o", tmp_path / "round")])
