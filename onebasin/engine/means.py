# SPDX-License-Identifier: Apache-2.0
"""With what a job computes: the type of the arithmetic, the device, threads or a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from onebasin.settings import Few, Settings, setting


@dataclass(frozen=True)
class Means(Settings):
    """With what a job computes. Only precision and device change results.

    units: the folder in which finished units of weight matching are kept; jobs that write a folder choose it.
    """

    section: ClassVar[str] = "Machine"

    precision: Literal["float32", "float64"] = setting("float32", "Type of the computation: float32 or float64.")
    device: str = setting("cpu", "Device of the computation: cpu, cuda, mps.")
    workers: Few | None = setting(
        None, "Threads of weight matching [default: one per core]; the result does not depend on them."
    )
    ray: str | None = setting(
        None, "Match and write on a Ray cluster at this address, which sees the same files; or local."
    )
    resume: bool = setting(
        False, "Go on where a run with this output was killed; merge with a budget goes on from its result, too."
    )
    units: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the computation."""
        return torch.float64 if self.precision == "float64" else torch.float32


def bfloat16_is_faster(device: str) -> bool:
    """Whether a product of matrices is formed faster in bfloat16 than in float32, tried on one of 512 rows.

    Processors without instructions for bfloat16 take up to forty times as long.
    """
    x = torch.ones(512, 512, device=device)

    def seconds(factor: torch.Tensor) -> float:
        begun = time.perf_counter()
        (factor @ factor)[0, 0].item()
        return time.perf_counter() - begun

    half, usual = x.bfloat16(), min(seconds(x) for _ in range(4))
    return any(1.5 * seconds(half) < usual for _ in range(4))


def refuse_device(name: str) -> None:
    """Raise ValueError for a device that is not there."""
    try:
        torch.zeros(1, device=name).item()  # which `meta` has not
    except (AssertionError, ImportError, RuntimeError):  # torch raises any of these
        raise ValueError(f"the device '{name}' is not available here; choose another, such as cpu") from None
