# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG. matplotlib is imported only here, and only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.engine import appearing_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind safe palette without its yellow. Markers distinguish the curves in greyscale.
COLOURS = ("#777777", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before long work.

    Raises:
        ValueError: It is not; the message says how to install it.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: pip install 'onebasin[plot]'")


@contextmanager
def drawing(file: str | Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure, which is saved when the block ends.

    Args:
        file: Where it is saved.
        width, height: Its size in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        **matplotlib.rcParamsDefault,  # ignore the user's theme
        "text.parse_math": False,  # a name with two dollar signs is not a formula
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with appearing_file(Path(file)) as temporary:
            figure.savefig(temporary)


def plot_curves(
    curves: Mapping[str, Mapping[str, Any]], file: str | Path, *, title: str, ends: tuple[str, str]
) -> None:
    """Plot loss and accuracy along each curve, side by side in one PNG.

    Rings mark the end losses, and a dotted line connects them; a curve's barrier is its largest excess over that line.

    Args:
        curves: Legend text -> the result of `landscape.curve`.
        file: The PNG to write.
        title: Title of the figure.
        ends: Names of the models at lambda = 0 and 1.

    Raises:
        ValueError: matplotlib is not installed.
    """
    with drawing(file, 9.5, 4.6) as figure:
        loss, accuracy = figure.subplots(1, 2)
        for i, (label, curve) in enumerate(curves.items()):
            look: dict[str, Any] = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i % len(MARKERS)],
                "markersize": 4,
            }
            loss.plot(curve["lambdas"], curve["losses"], label=f"{label} (barrier {curve['barrier']:.3f})", **look)
            accuracy.plot(curve["lambdas"], curve["accuracies"], **look)
        rings: dict[str, Any] = {
            "marker": "o",
            "markersize": 9,
            "fillstyle": "none",
            "linestyle": ":",
            "linewidth": 1,
        }
        for i, curve in enumerate(curves.values()):
            loss.plot([0, 1], curve["end_losses"], color="black", label=None if i else "end losses", **rings)
        for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
            axes.set_xlabel(f"λ (0: {ends[0]}, 1: {ends[1]})")
            axes.set_ylabel(name)
            axes.grid(alpha=0.25)
        accuracy.set_ylim(-0.02, 1.02)
        figure.suptitle(title)
        figure.legend(loc="outside lower center", ncols=min(len(curves) + 1, 4), fontsize=9)


def plot_simplex(surface: Mapping[str, Any], file: str | Path, *, title: str, names: tuple[str, str, str]) -> None:
    """Plot loss and accuracy over the triangle of weighted averages of three models, side by side in one PNG.

    Args:
        surface: The result of `landscape.simplex`.
        file: The PNG to write.
        title: Title of the figure.
        names: Names of the models, for the corners.

    Raises:
        ValueError: matplotlib is not installed.
    """
    corners = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.75**0.5))
    x, y = ([sum(w * c[k] for w, c in zip(share, corners, strict=True)) for share in surface["shares"]] for k in (0, 1))
    with drawing(file, 9.5, 4.4) as figure:
        for axes, name, colours in zip(
            figure.subplots(1, 2), ("losses", "accuracies"), ("viridis_r", "viridis"), strict=True
        ):
            drawn = axes.tricontourf(x, y, surface[name], levels=14, cmap=colours)
            axes.plot(x, y, ".", color="black", markersize=2)
            for (across, up), text in zip(corners, names, strict=True):
                axes.annotate(text, (across, up), xytext=(0, 8 if up else -14), textcoords="offset points", ha="center")
            axes.set_aspect("equal")
            axes.axis("off")
            figure.colorbar(drawn, ax=axes, label={"losses": "loss", "accuracies": "accuracy"}[name], shrink=0.8)
        figure.suptitle(f"{title} (barrier {surface['barrier']:.3f})")
