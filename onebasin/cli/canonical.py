# SPDX-License-Identifier: Apache-2.0
"""onebasin canonical"""

from __future__ import annotations

from typing import Annotated

import typer

from . import common as c


def canonical(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model: a folder or a hub id.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder to write.")],
    dtype: c.Dtype = None,
    precision: c.Precision = "float32",
    family: c.Family = None,
    even: Annotated[
        bool, typer.Option("--even", help="Make norms behind a sum even, too; changes the function.")
    ] = False,
    overwrite: c.Overwrite = False,
    verify: c.Verify = "outputs",
    no_verify: c.NoVerify = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Rewrite MODEL in canonical form: the same function, with norm weights and redundant biases folded away."""
    import onebasin

    with c.progress(quiet, first="writing the canonical form"):
        result = onebasin.canonical(
            model,
            output,
            dtype=dtype,
            precision=precision,
            family=family,
            even=even,
            overwrite=overwrite,
            verify="none" if no_verify else verify,
        )
    if c.wants_words(result, json, quiet):
        difference = result["max_output_difference"]
        print(
            f"{result['output']}" + (f": largest output difference {difference:.3g}" if difference is not None else "")
        )
        c.print_effort(result)
