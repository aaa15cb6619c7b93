# SPDX-License-Identifier: Apache-2.0
"""The demo and the barrier command, from end to end, on models trained for one epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import few_sweeps
from transformers import AutoModelForImageClassification
from typer.testing import CliRunner

from onebasin.cli import app
from onebasin.jobs.verdict import Verdict
from onebasin.studies.demo import BEST, CHOOSING, LEVELS, demo, train

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        few_sweeps(patch)
        patch.setitem(CHOOSING, "samples", 16)
        patch.setattr("onebasin.jobs.search.Setup.left", 0.5)  # seconds
        return folder, demo(folder, models=3, width=16, epochs=1)


def test_results_are_written_as_returned(run: tuple[Path, dict[str, Any]]) -> None:
    folder, results = run
    assert json.loads((folder / "results.json").read_text()) == results
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert Path(results["pair"][BEST]["report"]).read_text("utf-8").startswith("<!doctype html>")
    assert all(results[group][BEST]["verdict"]["agreement"] for group in ("pair", "all"))
    assert len(results["models"]) == 3
    assert set(results["curves"]) == {"none", *LEVELS}
    assert set(results["pair"]) == set(results["all"]) == {"none", *LEVELS, BEST}


def test_the_middle_of_each_curve_is_the_merged_model(run: tuple[Path, dict[str, Any]]) -> None:
    """Two ways to one number: interpolating two folders, and the folder that merging wrote."""
    _, results = run
    for level, curve in results["curves"].items():
        assert curve["lambdas"][5] == 0.5
        assert curve["losses"][5] == pytest.approx(results["pair"][level]["loss"], rel=1e-3)


def test_matching_keeps_the_ends(run: tuple[Path, dict[str, Any]]) -> None:
    _, results = run
    ends = [model["loss"] for model in results["models"][:2]]
    for curve in results["curves"].values():
        assert curve["end_losses"] == pytest.approx(ends, rel=1e-4)
    for level in LEVELS:
        merge = results["pair"][level]
        assert merge["distance_after"][0] < merge["distance_before"][0]


def test_the_models_are_ordinary_folders_and_differ(run: tuple[Path, dict[str, Any]]) -> None:
    folder, results = run
    models = [AutoModelForImageClassification.from_pretrained(model["folder"]) for model in results["models"]]
    weights = [model.classifier.weight for model in models]
    assert not weights[0].equal(weights[1]) and not weights[1].equal(weights[2])
    assert all((folder / f"model-{i}" / "preprocessor_config.json").is_file() for i in range(3))


def test_training_depends_on_its_seed_alone() -> None:
    first, again, other = (train(seed, epochs=1).classifier.weight for seed in (5, 5, 6))
    assert first.equal(again) and not first.equal(other)


def test_the_width_is_that_of_the_stream() -> None:
    assert train(0, epochs=1, width=16).classifier.weight.shape == (10, 16)
    with pytest.raises(ValueError, match="width 18: choose a multiple of 4"):
        demo(width=18)


def test_one_model_is_no_demo(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 models, not 1"):
        demo(tmp_path / "out", models=1)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebasin.studies.demo.find_spec", lambda name: None)
    monkeypatch.setitem(CHOOSING, "method", "average")  # searching for the best takes longer
    results = demo(tmp_path / "out", models=2, width=16, levels=(), epochs=1)
    assert results["picture"] is None and not (tmp_path / "out" / "curves.png").exists()
    assert (tmp_path / "out" / "results.json").is_file()


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_demo_says_whether_its_best_merges_work(
    run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebasin.studies.demo.demo", lambda *_, **__: run[1])
    said = " ".join(command("demo", "--quiet").stdout.split())
    for group in ("pair", "all"):
        assert Verdict(**run[1][group][BEST]["verdict"]).sentence in said


def barrier(folder: Path, output: Path, *more: object) -> Any:
    ends = folder / "model-0", folder / "model-1"
    task = ("--task", "image-classification", "--data", "builtin:digits", "--points", 3, "--limit", 100)
    return command("barrier", *ends, *task, "-o", output, *more)


@pytest.mark.parametrize("level", ["none", *LEVELS])
def test_barrier_command(run: tuple[Path, dict[str, Any]], tmp_path: Path, level: str) -> None:
    done = barrier(run[0], tmp_path / "out", "--match", level, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"lambdas", "losses", "accuracies", "barrier", "end_losses"}
    assert found == json.loads((tmp_path / "out" / "barrier.json").read_text())
    assert found["lambdas"] == [0, 0.5, 1]
    assert found["barrier"] == max(0.0, found["losses"][1] - sum(found["end_losses"]) / 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["barrier.json", "barrier.png"]


def test_barrier_command_on_bad_input(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "barrier.json").write_text("{}")
    assert "--overwrite" in barrier(run[0], tmp_path, "--match", "paper").stderr
    assert (tmp_path / "barrier.json").read_text() == "{}"
    for bad in (
        ("--match", "nothing"),
        ("--points", 1),
        ("--split", "validation"),
        ("--maskable", "5-x"),
        ("--data", "nowhere.csv"),
    ):
        done = barrier(run[0], tmp_path / "out", *bad)
        assert done.exit_code == 2, (bad, done.stderr)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
