# SPDX-License-Identifier: Apache-2.0
"""Plots: one PNG whatever the user's theme, and a clear sentence without matplotlib."""

import importlib.util
from pathlib import Path

import pytest

from onebasin.landscape.plots import plot_curves, plot_simplex

CURVE = {
    "lambdas": [0, 0.5, 1],
    "losses": [1, 3, 2],
    "accuracies": [0.9, 0.4, 0.8],
    "barrier": 1.5,
    "end_losses": [1, 2],
}


def test_png(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"figure.facecolor": "black", "savefig.facecolor": "black"}):
        plot_curves({"plain": CURVE, "full": CURVE}, tmp_path / "a.png", title="t", ends=("A", "B"))
    image = pytest.importorskip("PIL.Image").open(tmp_path / "a.png")
    assert image.format == "PNG"
    assert image.convert("L").getpixel((2, 2)) == 255  # light, in a dark theme too


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("onebasin.landscape.plots.find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ValueError, match=r"pip install 'onebasin\[plot\]'"):
        plot_curves({"plain": CURVE}, tmp_path / "a.png", title="t", ends=("A", "B"))
    assert not list(tmp_path.iterdir())


def test_a_name_with_two_dollar_signs_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = r"$\nosuch{$"
    plot_curves({name: CURVE}, tmp_path / "a.png", title=name, ends=(name, name))
    surface = {"shares": [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.3, 0.3, 0.4]], "losses": [1, 2, 3, 4],
               "accuracies": [1, 0, 0.5, 0.2], "barrier": 1.0}  # fmt: skip
    plot_simplex(surface, tmp_path / "b.png", title=name, names=(name, name, name))
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png"}


def test_a_picture_that_is_not_finished_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    (tmp_path / "a.png").write_text("before")

    def full(self: object, file: Path) -> None:
        Path(file).write_text("half of it")
        raise OSError("the disk is full")

    monkeypatch.setattr(figures.Figure, "savefig", full)
    with pytest.raises(OSError, match="full"):
        plot_curves({"plain": CURVE}, tmp_path / "a.png", title="t", ends=("A", "B"))
    assert (tmp_path / "a.png").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1
