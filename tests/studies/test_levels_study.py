# SPDX-License-Identifier: Apache-2.0
"""The levels study on tiny models: its curves start and end at the models, and agree with what else measures them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import few_sweeps, folder, folders, words
from typer.testing import CliRunner

from onebasin import merge
from onebasin.cli import app
from onebasin.data import evaluate, load_model
from onebasin.fusion import AVERAGES
from onebasin.landscape import curve
from onebasin.studies.levels import SETTINGS, Compared, study_levels, table

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("three_sweeps")

DIGITS = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path, dict[str, Any]]:
    """Two GPT-2 folders, the output, and the result of the whole study."""
    where = tmp_path_factory.mktemp("levels")
    models = folders(where)
    with pytest.MonkeyPatch.context() as patch:
        few_sweeps(patch)
        return models, where / "out", study_levels(*models, words(), where / "out", Compared(points=3))


def test_every_curve_starts_and_ends_at_the_models(study: tuple[list[Path], Path, dict[str, Any]]) -> None:
    """Matching keeps functions, and every method with weights (1, 0) or (0, 1) returns a model that it is given."""
    models, _, results = study
    ends = [evaluate(load_model(model, "causal-lm"), words()).loss for model in models]
    assert ends[0] != pytest.approx(ends[1], rel=1e-3)
    assert set(results["levels"]) == set(SETTINGS)
    for entry in results["levels"].values():
        assert set(entry["methods"]) == set(AVERAGES)
        for found in entry["methods"].values():
            assert [found["losses"][0], found["losses"][-1]] == pytest.approx(ends, rel=1e-4)


def test_unmatched_and_plainly_averaged_is_the_straight_line(study: tuple[list[Path], Path, dict[str, Any]]) -> None:
    models, _, results = study
    plain = results["levels"]["none"]["methods"]["average"]
    line = curve(*models, words(), points=3)
    assert plain["losses"] == pytest.approx(line["losses"], rel=1e-5)
    assert plain["barrier"] == pytest.approx(line["barrier"], abs=1e-5)


@pytest.mark.parametrize("method", AVERAGES)
@pytest.mark.parametrize("level", ["none", "paper", "full"])
def test_the_middle_is_the_merged_model(
    study: tuple[list[Path], Path, dict[str, Any]], tmp_path: Path, level: str, method: str
) -> None:
    models, _, results = study
    merge(models, tmp_path / "merged", match=level, method=method, anchor=0, rescale="joint")
    loss = evaluate(load_model(tmp_path / "merged", "causal-lm"), words()).loss
    assert results["levels"][level]["methods"][method]["losses"][1] == pytest.approx(loss, rel=1e-3)


def test_what_is_written(study: tuple[list[Path], Path, dict[str, Any]]) -> None:
    _, out, results = study
    assert json.loads((out / "levels.json").read_text()) == results
    assert (out / "levels.png").read_bytes().startswith(b"\x89PNG")
    rows = [row.strip("| ").split(" | ") for row in (out / "levels.md").read_text().splitlines()]
    assert rows[0] == ["level", *AVERAGES, "distance before", "distance after", "seconds"]
    assert [row[0] for row in rows[2:]] == list(SETTINGS)
    for row in rows[2:]:
        entry = results["levels"][row[0]]
        barriers = [entry["methods"][method]["barrier"] for method in AVERAGES]
        assert [float(cell) for cell in row[1:-1]] == pytest.approx(
            [*barriers, entry["distance_before"], entry["distance_after"]], abs=0.006
        )


def test_models_that_do_not_lie_on_one_line(tmp_path: Path) -> None:
    tied, untied = (folder(tmp_path / str(tie), "GPT2LMHeadModel", 1, tie_word_embeddings=tie) for tie in (True, False))
    with pytest.raises(ValueError, match=r"do not share the tensor 'lm_head"):
        study_levels(tied, untied, words(), tmp_path / "out", Compared(levels=["none"]))
    assert not (tmp_path / "out").exists()


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["study", "levels", *map(str, arguments)])


def test_study_levels_command(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    models = folders(tmp_path, "ViTForImageClassification", **DIGITS)
    given = (*models, "--task", "image-classification", "--data", "builtin:digits", "--limit", 20, "--points", 3)
    chosen = ("--levels", "none,paper", "--methods", "average", "-o", tmp_path / "out")
    done = command(*given, *chosen, "--json")
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "out" / "levels.json").read_text())
    assert set(results["levels"]) == {"none", "paper"}
    done = command(*given, *chosen)
    assert done.exit_code == 2 and "--overwrite" in done.stderr
    done = command(*given, *chosen, "--overwrite")
    assert done.exit_code == 0 and done.stdout == (tmp_path / "out" / "levels.md").read_text()
    assert "| none | " in done.stdout
    for bad in (("--levels", "none,all"), ("--levels", ","), ("--methods", "mean"), ("--points", 1), ("--task", "x")):
        done = command(*given, "-o", tmp_path / "bad", *bad)
        assert done.exit_code == 2, (bad, done.stderr)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert not (tmp_path / "bad").exists()


def test_a_table_shows_bad_rows_too() -> None:
    entry = {"distance_before": 2.0, "distance_after": 1.5, "seconds": 0.25}
    results = {
        "levels": {
            "none": {**entry, "methods": {"average": {"barrier": 1.0}}},
            "paper": {**entry, "methods": {"average": {"barrier": 7.1234}}},
        }
    }
    assert table(results).splitlines()[2:] == [
        "| none | 1.000 | 2.00 | 1.50 | 0.2 |",
        "| paper | 7.123 | 2.00 | 1.50 | 0.2 |",
    ]
