# SPDX-License-Identifier: Apache-2.0
"""The means of a computation: precision, device, threads or a cluster."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch

from onebasin.settings import Few, Settings, setting


@dataclass(frozen=True)
class Means(Settings):
    """The means of a computation. Only precision and device change results.

    Args:
        units: Folder for the finished units of weight matching; jobs that write a model choose it.
    """

    section: ClassVar[str] = "Machine"

    precision: Literal["float32", "float64"] = setting("float32", "Type of the computation: float32 or float64.")
    device: str = setting("cpu", "Device of the computation: cpu, cuda, mps.")
    workers: Few | None = setting(
        None, "Threads of weight matching [default: one per core, one for small models]; do not change the result."
    )
    ray: str | None = setting(
        None, "Match and write on the Ray cluster at this address, which must share this file system; or local."
    )
    resume: bool = setting(
        False, "Resume a killed run with this output; merge with a budget also continues from its result."
    )
    units: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the computation."""
        return torch.float64 if self.precision == "float64" else torch.float32


@cache
def bfloat16_is_faster(device: str) -> bool:
    """Return whether bfloat16 multiplies matrices faster than float32, timed on matrices of 512 rows.

    Processors without bfloat16 instructions take up to forty times as long.
    """
    x = torch.ones(512, 512, device=device)

    def seconds(factor: torch.Tensor) -> float:
        begun = time.perf_counter()
        (factor @ factor)[0, 0].item()
        return time.perf_counter() - begun

    half, usual = x.bfloat16(), min(seconds(x) for _ in range(4))
    return any(1.5 * seconds(half) < usual for _ in range(4))


def in_bfloat16(device: torch.device, wanted: bool) -> AbstractContextManager[object]:
    """Return a context in which matrices are multiplied in bfloat16 if that is wanted."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def refuse_device(name: str) -> None:
    """Refuse a device that is not available.

    Raises:
        ValueError: Torch cannot compute on it.
    """
    try:
        torch.zeros(1, device=name).item()  # fails on `meta`
    except (AssertionError, ImportError, RuntimeError):  # torch raises any of these
        raise ValueError(f"the device '{name}' is not available here; choose another, such as cpu") from None
