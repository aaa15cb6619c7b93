# SPDX-License-Identifier: Apache-2.0
"""Comparing weights without running models, and matching that is verified by its maps alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import folders
from safetensors.torch import load_file, save_file

import onebasin
from onebasin.models import Canonical, Folder
from onebasin.symmetry import Alignment
from onebasin.symmetry.groups.elements import Linear


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return folders(tmp_path)


def test_the_same_weights_and_one_number_that_is_not(pair: list[Path]) -> None:
    found = onebasin.verify(pair[0], pair[0], tensors=True)
    assert found.same and found.max_difference == 0 and found.tolerance == 0
    assert not onebasin.verify(*pair, tensors=True).same
    file = pair[1] / "model.safetensors"
    tensors = load_file(pair[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("c_fc.weight"))
    tensors[name][2, 3] += 1e-4
    save_file(tensors, file, {"format": "pt"})
    found = onebasin.verify(*pair, tensors=True)
    assert not found.same and found.max_difference == pytest.approx(1e-4, rel=1e-2)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError):  # the table misses a tensor
        onebasin.verify(*pair, tensors=True)


def test_a_copy_in_fewer_bits(pair: list[Path], tmp_path: Path) -> None:
    onebasin.merge([pair[0], pair[0]], tmp_path / "half", match="none", dtype="bfloat16")
    found = onebasin.verify(pair[0], tmp_path / "half", tensors=True)
    assert found.same and 0 < found.relative_difference <= 2**-8


def test_what_became_of_a_model_by_its_maps(pair: list[Path], tmp_path: Path) -> None:
    maps = tmp_path / "maps.safetensors"
    onebasin.match(*pair, tmp_path / "near", alignment=maps, verify="tensors")
    assert not onebasin.verify(pair[0], tmp_path / "near", tensors=True).same
    assert onebasin.verify(pair[0], tmp_path / "near", tensors=True, alignment=maps).same
    assert not onebasin.verify(pair[1], tmp_path / "near", tensors=True, alignment=maps).same
    assert onebasin.verify(pair[0], tmp_path / "near").same
    with pytest.raises(ValueError, match="--alignment belongs to --tensors"):
        onebasin.verify(*pair, alignment=maps)


def test_maps_that_change_the_function_are_refused(pair: list[Path], tmp_path: Path) -> None:
    maps = tmp_path / "maps.safetensors"
    onebasin.match(*pair, tmp_path / "near", alignment=maps, verify="none")
    found = Alignment.load(maps)
    key, rotation = next((key, element) for key, element in found.elements.items() if isinstance(element, Linear))
    Alignment({**found.elements, key: Linear(1.01 * rotation.matrix)}, found.batch).save(maps)
    with pytest.raises(ValueError, match="the maps of the alignment change the function"):
        onebasin.verify(pair[0], tmp_path / "near", tensors=True, alignment=maps)


@pytest.mark.parametrize("level", ["paper", "full"])
def test_a_wrong_map_is_not_written(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    from onebasin.symmetry.groups import Orthogonal, ScaledOrthogonal

    def sheared(self: object, moments: object) -> Linear:
        n = moments.primal.shape[-1]  # type: ignore[attr-defined]
        return Linear(torch.eye(n).expand_as(moments.primal) + 0.01)  # type: ignore[attr-defined]

    for group in (Orthogonal, ScaledOrthogonal):
        monkeypatch.setattr(group, "nearest", sheared)
        monkeypatch.setattr(group, "project", lambda group, element: element)
    with pytest.raises(ValueError, match="nothing was written"):
        onebasin.match(*pair, tmp_path / "out", symmetry=level, verify="tensors")
    assert not (tmp_path / "out").exists()


def test_ways_of_verifying(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outputs, tensors, none"):
        onebasin.match(*pair, tmp_path / "out", verify="everything")
    for way in ("tensors", "none", False):
        found = onebasin.match(*pair, tmp_path / str(way), verify=way)
        assert found["max_output_difference"] is None and found["peak_memory"] > 1 << 20
    assert onebasin.match(*pair, tmp_path / "run", verify=True)["max_output_difference"] < 1e-4


def test_the_canonical_form_tensor_by_tensor(pair: list[Path]) -> None:
    """Any order of reading gives the same numbers, and nothing but vectors stays in memory."""
    base = Folder(pair[0])
    one, other = Canonical(base, torch.float64), Canonical(base, torch.float64)
    roles = list(one.signature.tensors)
    first = {role: one.read(role, torch.float64) for role in roles}
    second = {role: other.read(role, torch.float64) for role in reversed(roles)}
    assert all(torch.equal(first[role], second[role]) for role in roles)
    assert all(tensor.dim() == 1 for tensor in one._kept.values())
