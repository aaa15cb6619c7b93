# SPDX-License-Identifier: Apache-2.0
"""What a job can be told: models, options, weights, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from onebasin.checkpoint import DTYPES

Model = str | Path | PreTrainedModel
Tell = Callable[[str], None]

MATCH_WITH = ("weights", "activations", "learned")
STREAM_LEVELS = ("orthogonal", "full", "invertible")


@dataclass(frozen=True)
class Options:
    """How to match: the levels are in `onebasin.symmetry.levels`, the descent in `onebasin.matching.match_weights`.

    match_with: weights, the activations on calibration data, or learned: from `start` (weights or activations), `steps`
    steps of gradient descent on what the average of the two predicts there. data: those data, `self` (causal language
    models write them) or a file; samples: how many sequences or images; task, context, vocabulary: as in
    `onebasin.data.load_task`.
    """

    symmetry: str = "paper"
    rescale: str = "joint"
    parts: Collection[str] | None = None
    layers: Collection[int] | None = None
    precision: str = "float32"
    device: str = "cpu"
    family: str | None = None
    starts: int = 1
    seed: int = 0
    tolerance: float = 1e-6
    max_sweeps: int = 100
    tensor_weights: Mapping[str, float] = field(default_factory=dict)
    match_with: str = "weights"
    start: str = "weights"
    steps: int = 200
    data: str | None = None
    task: str | None = None
    samples: int = 256
    context: int | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision '{self.precision}': the mathematics runs in float32 or float64")
        refuse_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def measures(self) -> bool:
        """Whether matching looks at what the models do on calibration data."""
        for option, given in (("match-with", self.match_with), ("start", self.start)):
            if given not in MATCH_WITH:
                raise ValueError(f"{option} '{given}': choose one of {', '.join(MATCH_WITH)}")
        if self.start == "learned":
            raise ValueError("start 'learned': learning starts from weights or activations")
        return self.match_with != "weights"

    @property
    def descent(self) -> dict[str, Any]:
        """What `match_weights` and `match_universe` are told about the descent."""
        return {
            "weights": self.weight,
            "tolerance": self.tolerance,
            "max_sweeps": self.max_sweeps,
            "starts": self.starts,
            "seed": self.seed,
        }

    def weight(self, role: str) -> float:
        """A tensor's weight in the objective: that of the first given name part that its role contains, else 1."""
        return next((weight for part, weight in self.tensor_weights.items() if part in role), 1.0)


def shares_of(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"{count} models need {count} weights, not {len(weights)}")
    if not all(abs(weight) < float("inf") for weight in weights):
        raise ValueError("weights must be finite numbers")
    return [float(weight) for weight in weights]


def stored_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}'; choose from {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def refuse_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError):  # torch raises either
        raise ValueError(f"the device '{name}' is not available here; choose another, such as cpu") from None


def refuse_out_of_range(option: str, number: int | None, count: int) -> None:
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--{option} {number}: the {count} models count from 0 to {count - 1}")
