# SPDX-License-Identifier: Apache-2.0
"""The triangle of losses agrees with the line along each edge, and with the models at its corners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import folder, folders, words
from typer.testing import CliRunner

from onebasin.cli import app
from onebasin.data import evaluate, load_model
from onebasin.landscape import curve, simplex


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("triangle")
    return folders(where, count=3)


def test_corners_edges_and_middle(models: list[Path]) -> None:
    found = simplex(models, words(), 4)
    at = {tuple(share): loss for share, loss in zip(found["shares"], found["losses"], strict=True)}
    assert len(at) == 10
    ends = [evaluate(load_model(model, "causal-lm"), words()).loss for model in models]
    assert found["end_losses"] == pytest.approx(ends, rel=1e-6)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        edge = curve(models[i], models[j], words(), 4)
        for lam, loss in zip(edge["lambdas"], edge["losses"], strict=True):
            share = [0.0] * 3
            share[i], share[j] = 1 - lam, lam
            nearest = min(at, key=lambda other: sum(abs(a - b) for a, b in zip(other, share, strict=True)))
            assert at[nearest] == pytest.approx(loss, rel=1e-5)
    states = [load_model(model, "causal-lm").state_dict() for model in models]
    middle = load_model(models[0], "causal-lm")
    middle.load_state_dict({name: sum(state[name] for state in states) / 3 for name in states[0]})
    third = min(at, key=lambda share: max(abs(w - 1 / 3) for w in share))
    assert at[third] == pytest.approx(evaluate(middle, words()).loss, rel=1e-5)
    excess = [loss - sum(w * end for w, end in zip(share, ends, strict=True)) for share, loss in at.items()]
    assert found["barrier"] == pytest.approx(max(excess), abs=1e-5)


def test_what_cannot_be_drawn(models: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs three models"):
        simplex(models[:2], words())
    with pytest.raises(ValueError, match="points 1: it must be greater than or equal to 2"):
        simplex(models, words(), 1)
    other = folder(tmp_path / "other", "GPT2LMHeadModel", 1, n_embd=24)
    with pytest.raises(ValueError, match="do not lie on one line"):
        simplex([*models[:2], other], words())


def test_the_command_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    digits: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    three = [folder(tmp_path / str(seed), "ViTForImageClassification", seed, **digits) for seed in (1, 2, 3)]
    given = ["--task", "image-classification", "--data", "builtin:digits", "--limit", "20", "--points", "3"]
    words = ["study", "simplex", *map(str, three), *given, "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "out" / "simplex.json").read_text())
    assert (tmp_path / "out" / "simplex.png").read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "--overwrite" in again.stderr
