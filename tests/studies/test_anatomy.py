# SPDX-License-Identifier: Apache-2.0
"""The anatomy study: planted differences between two alignments come out as they were planted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from pairs import folders
from typer.testing import CliRunner

from onebasin import match
from onebasin.cli import app
from onebasin.models import Canonical, Folder, distances
from onebasin.studies.anatomy import angles, layers, streams, study_anatomy
from onebasin.symmetry import Alignment, acting_groups
from onebasin.symmetry.groups.elements import Linear, Monomial
from onebasin.symmetry.groups.orthogonal import complement_of_ones, random_orthogonal

pytest.importorskip("matplotlib")


def turned_by(degrees: list[float], seed: int = 0) -> torch.Tensor:
    """A rotation by these angles in random planes at right angles to one another."""
    blocks = [
        torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]) for a in map(math.radians, degrees)
    ]
    basis = random_orthogonal(2 * len(degrees), (), torch.Generator().manual_seed(seed))
    return basis @ torch.block_diag(*blocks).double() @ basis.mT


def test_angles_of_planted_rotations() -> None:
    planted = [5.0, 30.0, 90.0, 179.0]
    found = angles(torch.stack([turned_by(planted), turned_by(planted, 1)]))
    assert torch.allclose(found, torch.tensor([5, 5, 30, 30, 90, 90, 179, 179]).double().expand(2, 8), atol=1e-6)
    assert torch.allclose(angles(3 * turned_by(planted)), found[0], atol=1e-6)  # scales do not count
    assert torch.allclose(angles(-torch.eye(3)), torch.full((3,), 180.0, dtype=torch.float64))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("anatomy")
    return folders(where)


def test_what_was_changed_is_what_is_found(models: list[Path]) -> None:
    signature = Canonical(Folder(models[0]), torch.float64).signature
    groups = acting_groups(signature, "full", rescale="joint")
    generator = torch.Generator().manual_seed(0)
    elements = {}
    for root, group in groups.items():
        space = signature.spaces[root]
        elements[root] = group.random(space.size, tuple(signature.spaces[key].size for key in space.batch), generator)
    over = {root: signature.spaces[root].batch for root in elements}
    first = Alignment(elements, over)
    ((stream, map_),) = [(r, g) for r, g in elements.items() if isinstance(g, Linear) and not over[r]]
    basis = complement_of_ones(len(map_.matrix))
    inner = torch.eye(len(map_.matrix) - 1, dtype=torch.float64)
    inner[:2, :2] = turned_by([40.0])
    ffn = next(r for r in elements if signature.spaces[r].part == "ffn" and signature.spaces[r].layer == 1)
    swapped = elements[ffn].index.clone()
    swapped[[0, 3]] = swapped[[3, 0]]
    heads = next(r for r in elements if signature.spaces[r].layer == 0 and not over[r] and "head" in r)
    other = elements[heads].index.roll(1)
    planted = {stream: Linear((basis @ inner @ basis.mT + 1 / len(basis)) @ map_.matrix), ffn: Monomial(swapped),
               heads: Monomial(other)}  # fmt: skip
    second = Alignment({**elements, **planted}, over)
    found = torch.tensor(streams(signature, first, second)[stream]["angles"])
    assert found[-2:].tolist() == pytest.approx([40, 40], abs=1e-4) and found[:-2].abs().max() < 1e-4
    rows = layers(signature, first, second)
    assert [row["neurons"] for row in rows] == [0, 2 / len(swapped)]
    assert [row["heads"] for row in rows] == [1, 0]
    assert all(value is None for value in rows[0]["turned"].values())  # no head kept its partner
    assert all(value < 1e-4 for value in rows[1]["turned"].values())
    nothing = layers(signature, first, first)
    assert all(row["neurons"] == row["heads"] == 0 for row in nothing)


def test_the_command_writes_what_it_prints(models: list[Path], tmp_path: Path) -> None:
    saved = []
    for name, how in (("weights", {}), ("activations", {"match_with": "activations", "data": "self", "samples": 64})):
        saved.append(tmp_path / f"{name}.safetensors")
        match(models[1], models[0], tmp_path / name, symmetry="full", alignment=saved[-1], **how)
    words = ["study", "anatomy", *map(str, (*models, *saved)), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "out" / "anatomy.json").read_text())
    assert (tmp_path / "out" / "anatomy.png").read_bytes().startswith(b"\x89PNG")
    pair = [Canonical(Folder(place), torch.float32) for place in reversed(models)]
    for place, given in zip(saved, results["distances"], strict=True):
        assert given["distance"] == pytest.approx(distances(*pair, Alignment.load(place)).distance, rel=1e-5)
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "--overwrite" in again.stderr
    shown = CliRunner().invoke(app, [*words, "--overwrite"])
    assert shown.exit_code == 0 and "| layer | neurons | heads |" in shown.stdout


def test_an_alignment_of_other_models_is_refused(models: list[Path], tmp_path: Path) -> None:
    Alignment({"ffn": Monomial(torch.arange(3))}).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="belongs to other models"):
        study_anatomy(*models, *[tmp_path / "x.safetensors"] * 2, tmp_path / "out")
