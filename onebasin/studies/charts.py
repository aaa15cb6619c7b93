# SPDX-License-Identifier: Apache-2.0
"""Charts of studies, drawn by matplotlib: as PNG files, and as SVG inside the report."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.engine import appearing_file
from onebasin.landscape.plots import COLOURS, MARKERS, require_matplotlib

from .results import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(chart: Chart) -> Figure:
    """Return the chart as a figure. Raises ValueError if matplotlib is not installed, KeyError for an unknown kind."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = {"bars": _bars, "lines": _lines, "contours": _contours}[chart.kind]
    panels = len(chart.series) if chart.kind == "contours" else 1
    wide = (
        max(7.0, 0.32 * len(chart.x) * len(chart.series))
        if chart.kind == "bars"
        else 4.6 * panels
        if panels > 1
        else 7.0
    )
    figure = Figure(figsize=(min(wide, 14.0), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    with matplotlib.rc_context({"text.parse_math": False}):  # a name with two dollar signs is not a formula
        kind(figure, chart)
        figure.suptitle(chart.title, fontsize=11)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Save a figure as PNG on white."""
    with appearing_file(file) as temporary:
        figure.savefig(temporary, facecolor="white")


def svg(figure: Figure) -> str:
    """Return a figure as SVG without a background, and with the page's text colour instead of black, so that it can be
    read in light and dark mode."""
    import matplotlib

    for axes in figure.axes:
        axes.patch.set_alpha(0)
    page = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "onebasin"}):
        figure.savefig(page, format="svg", transparent=True, metadata={"Date": None})
    text = page.getvalue()
    text = (
        text[text.index("<svg") :].replace("#000000", "currentColor").replace("fill: none; stroke: none", "fill: none")
    )
    return text.replace("<text ", '<text fill="currentColor" ')


def _bars(figure: Figure, chart: Chart) -> None:
    axes = _axes(figure, chart)
    width = 0.8 / len(chart.series)
    for i, (name, values) in enumerate(chart.series.items()):
        places = [j + (i - (len(chart.series) - 1) / 2) * width for j in range(len(chart.x))]
        heights, errors = zip(*((v if isinstance(v, list | tuple) else (v, 0.0)) for v in values), strict=True)
        axes.bar(places, [h or 0.0 for h in heights], width * 0.92, yerr=errors if any(errors) else None, label=name,
                 color=COLOURS[i % len(COLOURS)], error_kw={"elinewidth": 0.8, "capsize": 1.5})  # fmt: skip
    axes.set_xticks(range(len(chart.x)), [str(label) for label in chart.x])
    if max(len(str(label)) for label in chart.x) * len(chart.x) > 70:
        for label in axes.get_xticklabels():
            label.set(rotation=20, ha="right", rotation_mode="anchor")
    _legend(axes, chart)


def _lines(figure: Figure, chart: Chart) -> None:
    axes = _axes(figure, chart)
    for i, (name, values) in enumerate(chart.series.items()):
        axes.plot(chart.x, values, label=name, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)],
                  markersize=4)  # fmt: skip
    _legend(axes, chart)


def _contours(figure: Figure, chart: Chart) -> None:
    panels = figure.subplots(1, len(chart.series), squeeze=False)[0]
    for axes, (name, panel) in zip(panels, chart.series.items(), strict=True):
        filled = axes.contourf(panel["x"], panel["y"], panel["z"], levels=16, cmap="viridis")
        figure.colorbar(filled, ax=axes, label=chart.ylabel)
        for mark, (x, y) in panel["marks"].items():
            axes.plot([x], [y], marker="o", color="white", markeredgecolor="black")
            axes.annotate(mark, (x, y), xytext=(4, 4), textcoords="offset points", color="white", fontsize=8)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(chart.xlabel)


def _axes(figure: Figure, chart: Chart) -> Any:
    axes = figure.subplots()
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return axes


def _legend(axes: Any, chart: Chart) -> None:
    if len(chart.series) > 1:
        axes.legend(frameon=False, fontsize=8)
