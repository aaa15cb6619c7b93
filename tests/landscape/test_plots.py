# SPDX-License-Identifier: Apache-2.0
"""Plots: one PNG whatever the user's theme, and a clear sentence without matplotlib."""

import importlib.util
from pathlib import Path

import pytest

from onebasin.landscape.plots import plot_curves

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
