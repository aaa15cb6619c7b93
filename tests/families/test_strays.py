# SPDX-License-Identifier: Apache-2.0
"""A tensor that the table does not account for stops the run and is named: nothing is dropped or averaged unseen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

import onebasin
from onebasin.families import table_for
from onebasin.models.errors import ModelError
from onebasin.models.folder import Folder
from onebasin.symmetry import TableError, resolve

Saved = Callable[[str], Folder]


def strays(checkpoint: Folder) -> list[str]:
    """Names that no model of this type has: at the top, and beside what the first layer has."""
    inside = next(entry.name for entry in checkpoint.signature.tensors.values() if entry.layer == 0)
    place = inside.rpartition(".")[0]
    return ["stray.weight", f"{place}.stray", f"{place}.stray.weight", f"{inside}_scale"]


@pytest.mark.parametrize("case", zoo.CASES)
def test_a_stray_tensor_is_named(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    table = table_for(checkpoint.config["model_type"])
    for name in strays(checkpoint):
        with pytest.raises(TableError, match=f"does not know '{re.escape(name)}'"):
            resolve(table, {**checkpoint.shapes, name: (2, 2)}, checkpoint.config)


@pytest.mark.parametrize(
    "case",
    ["LlamaForCausalLM", "MixtralForCausalLM", "GPTNeoXForCausalLM", "T5ForConditionalGeneration",
     "WhisperForConditionalGeneration", "CLIPModel"],
)  # fmt: skip
def test_no_job_goes_on_with_a_stray_tensor(case: str, saved: Saved, tmp_path: Path) -> None:
    good = saved(case).folder
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    tensors = load_file(bad / "model.safetensors")
    tensors["adapter.stray.weight"] = torch.ones(2)
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    for job in (
        lambda: onebasin.match(bad, good, tmp_path / "out"),
        lambda: onebasin.match(good, bad, tmp_path / "out", symmetry="full"),
        lambda: onebasin.merge([good, bad], tmp_path / "out", match="none"),
        lambda: onebasin.merge([good, bad], tmp_path / "out", match="full"),
        lambda: onebasin.distance(good, bad),
        lambda: onebasin.canonical(bad, tmp_path / "out"),
    ):
        with pytest.raises(ModelError, match=r"'adapter\.stray\.weight'"):
            job()
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]
