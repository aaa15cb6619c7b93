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
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Compare the weights instead, tensor by tensor; nothing is run.")
    ] = False,
    alignment: Annotated[
        str | None, typer.Option(help="With --tensors: the file of the maps that turned A into B (match --alignment).")
    ] = None,
    family: c.Family = None,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Check whether A and B compute the same function on random inputs. Exit code 0 if they do, 1 if not."""
    import onebasin

    with c.progress(quiet, first="comparing tensors" if tensors else "comparing outputs on random inputs"):
        verdict = onebasin.verify(
            a, b, tensors=tensors, alignment=alignment, family=family, precision=precision, device=device, seed=seed
        )
    if json:
        c.print_json({
            "same": verdict.same,
            "max_difference": verdict.max_difference,
            "relative_difference": verdict.relative_difference,
        })  # fmt: skip
    elif not quiet:
        what = "weights" if tensors and alignment is None else "function" + "s" * (not verdict.same)
        word = f"{'same' if verdict.same else 'different'} {what}"
        print(f"{word}: max |difference| {verdict.max_difference:.3g}, relative {verdict.relative_difference:.3g} "
              f"(allowed {verdict.tolerance:.3g})")  # fmt: skip
    raise typer.Exit(0 if verdict.same else 1)
