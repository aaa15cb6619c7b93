# SPDX-License-Identifier: Apache-2.0
"""onebasin verify"""

from __future__ import annotations

from typing import Annotated

import typer

from . import common as c


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="A model: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another model.")],
    precision: Annotated[str, typer.Option(help="Type that both models run in: float32 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    device: c.Device = "cpu",
    family: c.Family = None,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Check whether A and B compute the same function. They are run on random inputs; exit code 0: yes, 1: no."""
    if precision not in ("float32", "float64"):
        raise ValueError(f"--precision '{precision}': choose float32 or float64")
    import torch

    import onebasin

    with c.progress(quiet) as tell:
        if tell:
            tell("comparing outputs on random inputs")
        verdict = onebasin.verify(a, b, family=family, dtype=getattr(torch, precision), seed=seed, device=device)
    if json:
        c.print_json({
            "same": verdict.same,
            "max_difference": verdict.max_difference,
            "relative_difference": verdict.relative_difference,
        })  # fmt: skip
    elif not quiet:
        word = "same function" if verdict.same else "different functions"
        print(f"{word}: max |difference| {verdict.max_difference:.3g}, relative {verdict.relative_difference:.3g} "
              f"(allowed {verdict.tolerance:.3g})")  # fmt: skip
    raise typer.Exit(0 if verdict.same else 1)
