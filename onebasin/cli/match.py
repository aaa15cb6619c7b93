# SPDX-License-Identifier: Apache-2.0
"""onebasin match"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import common as c
from . import matching as m


@m.matches
def match(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model to rewrite: a folder or a hub id.")],
    anchor: Annotated[str, typer.Argument(metavar="ANCHOR", help="The model to match it to.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder to write.")],
    symmetry: Annotated[str, c.level(f"Which symmetries to use (see docs/concepts.md): {c.LEVELS}.")] = "paper",
    layers: m.Layers = None,
    alignment: Annotated[str | None, typer.Option(help="Also save the maps that were found, as safetensors.")] = None,
    anchor_output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the rewritten anchor, for levels orthogonal, full and invertible [default: OUTPUT-anchor]."
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Folder of a LoRA adapter (peft) of SOURCE, to rewrite along with it.")
    ] = None,
    adapter_output: Annotated[
        str | None, typer.Option(help="Folder of the rewritten adapter [default: OUTPUT-adapter].")
    ] = None,
    *,
    matching: dict[str, Any],
    push_to_hub: c.Push = None,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Bring SOURCE as close to ANCHOR as possible, with its function unchanged."""
    import onebasin

    with c.progress(quiet) as tell:
        result = onebasin.match(
            source, anchor, output, symmetry=symmetry, layers=c.numbers(layers, "--layers"), alignment=alignment,
            anchor_output=anchor_output, adapter=adapter, adapter_output=adapter_output, **matching,
            tell=tell, command=c.command_line(),
        )  # fmt: skip
        c.push(output, push_to_hub, result, tell)
    if c.wants_words(result, json, quiet):
        before, after = result["distance_before"], result["distance_after"]
        print(f"{result['output']}: distance to {result['anchor']} {before:.6g} -> {after:.6g}")
        if result["max_output_difference"] is not None:
            print(f"same function: largest output difference {result['max_output_difference']:.3g}")
        if "anchor_output" in result:
            print(f"{result['anchor_output']}: the anchor in canonical form; merge with this one")
        if "adapter_output" in result:
            print(f"{result['adapter_output']}: the adapter of {result['output']}")
        c.print_effort(result)
