# SPDX-License-Identifier: Apache-2.0
"""Threads over independent units of work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> list[R]:
    """[function(item) for item in items], `workers` at a time (default: one per core); results in order.

    Threads are enough: GEMM, SVD and assignment release the interpreter. Each unit runs its linear algebra on one
    core, so the result has the same bits for any number of workers. The first exception is raised.
    """
    units = list(items)
    count = min(workers or os.cpu_count() or 1, max(len(units), 1))
    with _one_core_each():
        if count == 1:
            return [function(unit) for unit in units]
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(function, units))


@contextmanager
def _one_core_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
