# SPDX-License-Identifier: Apache-2.0
"""The options of every command that matches and writes models: how, on which data, and with which means."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import common as c
from . import tasks as t

MatchWith = Annotated[str, typer.Option(help="What is compared: weights, activations on --data, or learned there.")]
Start = Annotated[str, typer.Option(help="Where learning starts from: weights, activations or none.")]
Steps = Annotated[int, typer.Option(help="Steps of learning.")]
Patience = Annotated[
    int | None,
    typer.Option(help="End learning when so many of its 20 looks at held-out data bring nothing [default: never]."),
]
Rate = Annotated[float, typer.Option(help="The largest learning rate of learning.")]
Loss = Annotated[
    str,
    typer.Option(
        help="What learning lowers: divergence from the models' predictions, the distance from their logits, or the "
        "task's own loss."
    ),
]
Permutations = Annotated[
    str,
    typer.Option(
        help="In learning: fixed as they start; straight-through learns them, too; sinkhorn (merge only) mixes "
        "neurons, and the averaged models are then no longer the same functions as their sources."
    ),
]
Saved = Annotated[
    str | None, typer.Option("--checkpoint", help="Save learning in this file as it goes, and continue from it.")
]
Noise = Annotated[
    float, typer.Option(help="Standard deviation of noise on 8 copies of every calibration image (or sound).")
]
Parts = Annotated[str | None, typer.Option(help="Move only these parts, of attention,ffn,stream,head [default: all].")]
Layers = Annotated[str | None, typer.Option(help="Move only these layers, such as 0-4,11 [default: all].")]
BestLayers = Annotated[
    str | None,
    typer.Option(
        help="Move only these layers, such as 0-4,11 [default: all]; auto: the one, or all, with which the merged "
        "model does best on --validation."
    ),
]
Starts = Annotated[int, typer.Option(help="Tries of the search where spaces are coupled; the closest is kept.")]
Weight = Annotated[
    list[str] | None,
    typer.Option("--tensor-weight", help="NAME=W: tensors whose name contains NAME count W times. Repeatable."),
]
Relative = Annotated[
    bool, typer.Option("--relative", help="Divide every tensor's distance by the root of both norms' product.")
]
Ray = Annotated[
    str | None,
    typer.Option(help="Match and write on a Ray cluster at this address, which sees the same files; or local."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a run with this output was killed.")]


# Calibration data: option -> its type and default. `on_data` tells the jobs what they say.
DATA: dict[str, tuple[Any, Any]] = {
    "data": (c.Data, None),
    "columns": (t.Columns, None),
    "samples": (c.Samples, 256),
    "task": (c.Task, None),
    "context": (c.Context, None),
    "vocabulary": (c.Vocabulary, None),
    "mask_id": (t.MaskId, None),
    "mask_share": (t.MaskShare, 0.15),
    "maskable": (t.Maskable, None),
}

OPTIONS: dict[str, tuple[Any, Any]] = {
    "rescale": (c.Rescale, "joint"),
    "parts": (Parts, None),
    "starts": (Starts, 1),
    "seed": (c.Seed, 0),
    "tensor_weight": (Weight, None),
    "relative": (Relative, False),
    "match_with": (MatchWith, "weights"),
    "start": (Start, "weights"),
    "steps": (Steps, 200),
    "patience": (Patience, None),
    "lr": (Rate, 8e-3),
    "loss": (Loss, "divergence"),
    "permutations": (Permutations, "fixed"),
    "checkpoint": (Saved, None),
    **DATA,
    "noise": (Noise, 0.0),
    "family": (c.Family, None),
    "dtype": (c.Dtype, None),
    "precision": (c.Precision, "float32"),
    "device": (c.Device, "cpu"),
    "workers": (c.Workers, None),
    "ray": (Ray, None),
    "resume": (Resume, False),
    "verify": (c.Verify, "outputs"),
    "no_verify": (c.NoVerify, False),
    "overwrite": (c.Overwrite, False),
}


def on_data(given: dict[str, Any]) -> dict[str, Any]:
    """What was typed of DATA, as the jobs take it."""
    return {**given, "data": c.datasets(given["data"]), "columns": t.renamed(given["columns"]),
            "maskable": t.ids(given["maskable"])}  # fmt: skip


def _matching(given: dict[str, Any]) -> dict[str, Any]:
    told = on_data(given)
    told["verify"] = "none" if told.pop("no_verify") else told["verify"]
    told["parts"] = c.words(told["parts"])
    told["tensor_weights"] = c.pairs(told.pop("tensor_weight"))
    return told


calibrates = c.takes(DATA, "calibration", on_data)
matches = c.takes(OPTIONS, "matching", _matching)
