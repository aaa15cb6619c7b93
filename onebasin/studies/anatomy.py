# SPDX-License-Identifier: Apache-2.0
"""The anatomy of a difference between two alignments of one model to another, space by space.

With g and h the maps of a space in two alignments, h g^-1 leads from one to the other. For a residual stream this is a
rotation, whose eigenvalues e^(i phi) show by how much it rotates each of its planes; of neurons and heads that are
permuted, the number with different partners counts. Theus et al., 2025, section 6 compare learned alignments with
weight-matched ones in this way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.engine import appearing_json
from onebasin.landscape.plots import COLOURS, drawing, require_matplotlib
from onebasin.models import Canonical, Distances, Folder, Model, ModelError, distances
from onebasin.symmetry import Alignment, Signature
from onebasin.symmetry.exactness import refuse_other_shapes
from onebasin.symmetry.groups import polar
from onebasin.symmetry.groups.elements import Element, Linear, Monomial

from .results import refuse_results

BINS = 36  # of the histogram of angles, five degrees each


def study_anatomy(
    a: str | Path,
    b: str | Path,
    first: str | Path,
    second: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Compare two alignments of `b` to `a`, as `onebasin match --alignment` saves them.

    Writes anatomy.json and anatomy.png to `output`.

    Returns:
        The object in anatomy.json: `models`, `alignments`, `distances` ([of the first, of the second]: in total and per
        layer), `streams` (space -> `angles` in degrees between 0 and 180, sorted, or `changed`, the share of its
        dimensions with another partner) and `layers` (one object each: `layer`, `neurons` and `heads`, the shares with
        another partner, and `turned`, space -> mean angle in degrees inside the heads with the same partner). A share
        or angle is null if there is nothing of its kind.

    Raises:
        ValueError: An alignment belongs to other models, the output exists, or matplotlib is missing.
    """
    require_matplotlib()
    folder = Path(output)
    refuse_results(output, ["anatomy.json", "anatomy.png"], [a, b, first, second], overwrite)
    alignments = [Alignment.load(place) for place in (first, second)]
    with closing(Folder(b)) as source, closing(Folder(a)) as anchor:
        models: list[Model] = [source, anchor]
        if any(_rotates(models[0].signature, alignment) for alignment in alignments):
            models = [Canonical(model, torch.float32) for model in models]
        signature = models[0].signature
        for place, alignment in zip((first, second), alignments, strict=True):
            try:
                refuse_other_shapes(signature, alignment.elements)
            except ValueError as error:
                raise ModelError(f"'{place}': {error}") from None
        apart = [distances(models[0], models[1], alignment) for alignment in alignments]
    results: dict[str, Any] = {
        "models": [str(a), str(b)],
        "alignments": [str(first), str(second)],
        "distances": [{"distance": one.distance, "layers": one.layers} for one in apart],
        "streams": streams(signature, *alignments),
        "layers": layers(signature, *alignments),
    }
    folder.mkdir(parents=True, exist_ok=True)
    appearing_json(folder / "anatomy.json", results)
    _draw(results, apart, folder / "anatomy.png")
    return results


def streams(signature: Signature, first: Alignment, second: Alignment) -> dict[str, dict[str, Any]]:
    """Return angles between the two maps, or the share of other partners, for all moving spaces that layers share."""
    found: dict[str, dict[str, Any]] = {}
    for root in _moving(first, second):
        if signature.spaces[root].layer is None and not signature.spaces[root].batch:
            g, h = _pair(signature, root, first, second)
            if isinstance(g, Monomial) and isinstance(h, Monomial):
                found[root] = {"changed": _changed(g.index, h.index)}
            else:
                found[root] = {"angles": angles(_between(g, h)).tolist()}
    return found


def layers(signature: Signature, first: Alignment, second: Alignment) -> list[dict[str, Any]]:
    """Return for every layer the shares of neurons and heads with another partner, and mean angles inside the heads
    with the same one."""
    found = []
    for layer in signature.layers:
        row: dict[str, Any] = {"layer": layer, "neurons": None, "heads": None, "turned": {}}
        mine = [root for root in _moving(first, second) if signature.spaces[root].layer == layer]
        for kind, part in (("neurons", "ffn"), ("heads", "attention")):
            outer = [root for root in mine if signature.spaces[root].part == part and not signature.spaces[root].batch]
            pairs = [_pair(signature, root, first, second) for root in outer]
            shares = [
                _changed(g.index, h.index) for g, h in pairs if isinstance(g, Monomial) and isinstance(h, Monomial)
            ]
            row[kind] = sum(shares) / len(shares) if shares else None
        for root in mine:
            over = signature.spaces[root].batch
            g, h = _pair(signature, root, first, second)
            if len(over) == 1 and (isinstance(g, Linear) or isinstance(h, Linear)):
                turned = angles(_between(g, h))[_kept(over[0], signature, first, second)]
                row["turned"][root] = float(turned.mean()) if turned.numel() else None
        found.append(row)
    return found


def angles(matrix: Tensor) -> Tensor:
    """Return the angles of a rotation's eigenvalues (of the polar factor of other matrices), in degrees from 0 to 180,
    sorted.

    matrix: (*batch, n, n) -> (*batch, n). Complex eigenvalues come in pairs, so each angle occurs twice.
    """
    values = torch.linalg.eigvals(polar(matrix.double()))
    return torch.rad2deg(values.angle().abs()).sort(-1).values


def _between(first: Element, second: Element) -> Tensor:
    """Return h g^-1 as a matrix."""
    g, h = (one.dense() if isinstance(one, Monomial) else one for one in (first, second))
    return h.after(g.inverse()).matrix.double()


def _changed(first: Tensor, second: Tensor) -> float:
    return float((first != second).double().mean())


def _kept(heads: str, signature: Signature, first: Alignment, second: Alignment) -> Tensor:
    """Return which heads have the same partner in both alignments, (heads,)."""
    count = signature.spaces[heads].size
    if heads not in first.elements and heads not in second.elements:
        return torch.ones(count, dtype=torch.bool)
    g, h = _pair(signature, heads, first, second)
    assert isinstance(g, Monomial) and isinstance(h, Monomial)
    return g.index == h.index


def _pair(signature: Signature, root: str, first: Alignment, second: Alignment) -> tuple[Element, Element]:
    """Return both maps of a space, the identity if an alignment has none."""
    space = signature.spaces[root]
    shape = tuple(signature.spaces[key].size for key in space.batch)
    still = Monomial(torch.arange(space.size).expand(*shape, space.size))
    return first.elements.get(root, still), second.elements.get(root, still)


def _moving(first: Alignment, second: Alignment) -> list[str]:
    return list(dict.fromkeys((*first, *second)))


def _rotates(signature: Signature, alignment: Alignment) -> bool:
    """Whether a space outside the heads is rotated, which requires canonical forms."""
    return any(
        isinstance(element, Linear) and root in signature.spaces and not signature.spaces[root].batch
        for root, element in alignment.elements.items()
    )


# --- showing ------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Return a line per stream and a Markdown table of the layers."""
    lines = []
    for root, stream in results["streams"].items():
        if "changed" in stream:
            lines.append(f"{root}: {stream['changed']:.1%} of the dimensions have another partner")
        else:
            found = torch.tensor(stream["angles"])
            lines.append(f"{root}: mean angle {found.mean():.1f} degrees, median {found.median():.1f}, "
                         f"maximum {found.max():.1f}")  # fmt: skip
    one, two = (each["distance"] for each in results["distances"])
    lines += [f"distance: {one:.2f} and {two:.2f}", ""]
    spaces = list(dict.fromkeys(_inside(root) for row in results["layers"] for root in row["turned"]))
    lines += ["| " + " | ".join(["layer", "neurons", "heads", *(f"{name}, degrees" for name in spaces)]) + " |"]
    lines += ["|" + "---:|" * (3 + len(spaces))]
    for row in results["layers"]:
        turned = {_inside(root): value for root, value in row["turned"].items()}
        shares = [row[kind] for kind in ("neurons", "heads")]
        cells = [str(row["layer"]), *("" if share is None else f"{share:.1%}" for share in shares)]
        cells += ["" if turned.get(name) is None else f"{turned[name]:.1f}" for name in spaces]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _inside(root: str) -> str:
    """`layer.3.qk` -> `qk`: a space's name without its layer."""
    return root.rpartition(".")[2] or root


def _draw(results: Mapping[str, Any], apart: Sequence[Distances], file: Path) -> None:
    """Draw a histogram of the streams' angles, changed matches per layer, and distances per layer."""
    from matplotlib.ticker import MaxNLocator

    with drawing(file, 12.5, 4.0) as figure:
        turned, changed, far = figure.subplots(1, 3)
        for i, (root, stream) in enumerate(results["streams"].items()):
            if "angles" in stream:
                turned.hist(stream["angles"], bins=BINS, range=(0, 180), color=COLOURS[2 + i], alpha=0.8, label=root)
        turned.set(xlabel="angle (degrees)", ylabel="dimensions", title="rotations between the streams' maps")
        numbers = [row["layer"] for row in results["layers"]]
        for i, kind in enumerate(("neurons", "heads")):
            shares = [row[kind] for row in results["layers"]]
            places = [number + 0.4 * i - 0.2 for number in numbers]
            changed.bar(places, [share or 0.0 for share in shares], 0.4, color=COLOURS[1 + i], label=kind)
        changed.set(xlabel="layer", ylabel="share", ylim=(0, 1.25), title="matches that changed")
        for i, (one, name) in enumerate(zip(apart, ("first", "second"), strict=True)):
            far.plot(
                list(map(int, one.layers)), list(one.layers.values()), "os"[i] + "-", color=COLOURS[i * 2], label=name
            )
        far.set(xlabel="layer", ylabel="distance", title="distances to the anchor")
        for axes in (changed, far):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in (turned, changed, far):
            axes.grid(alpha=0.25)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=9)
