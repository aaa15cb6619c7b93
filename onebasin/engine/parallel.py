# SPDX-License-Identifier: Apache-2.0
"""Threads over independent units of work."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_inside = threading.local()  # set in threads that run a unit: what they call runs in line


def in_parallel(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> list[R]:
    """Return [function(item) for item in items], computed in threads.

    Threads are enough: GEMM, SVD and assignment release the interpreter. Each unit runs its linear algebra on one
    core, so the result has the same bits for any number of workers. The first exception is raised.

    workers: how many run at a time (default: one per core).
    """
    return list(in_order(function, items, workers))


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> Iterator[R]:
    """Yield what `in_parallel` returns, one by one; at most one result for every worker waits to be taken."""
    count = workers or os.cpu_count() or 1
    with one_core_each():
        if count == 1 or getattr(_inside, "unit", False):
            yield from map(function, items)
            return
        waiting: deque[Future[R]] = deque()
        with ThreadPoolExecutor(count, initializer=_mark) as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(function, item))
                    if len(waiting) > 2 * count - 1:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def behind(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Call function(item) for every item, in order, in one thread, while the caller's thread makes the next but one.

    The first exception of either thread is raised.
    """
    waiting: deque[Future[object]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 1:
                waiting.popleft().result()
        for future in waiting:
            future.result()


@contextmanager
def meanwhile(function: Callable[[threading.Event], R], patient: bool = False) -> Iterator[Callable[[], R]]:
    """function(stop) in a thread of its own while the block runs; yields what waits for its result.

    `stop` is set when the block ends: the function should then come to an end, too. patient: it takes what the other
    threads leave of the cores until somebody waits for it (Linux; elsewhere it has its share from the beginning).
    """
    stop, wanted = threading.Event(), threading.Event()
    thread: list[int] = []

    def hurry() -> None:
        wanted.set()
        for number in thread:
            _schedule(number, "SCHED_OTHER")

    def run() -> R:
        if patient:
            thread.append(threading.get_native_id())
            _schedule(thread[0], "SCHED_IDLE")
            if wanted.is_set():
                hurry()
        return function(stop)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)

        def result() -> R:
            hurry()
            return future.result()

        try:
            yield result
        finally:
            stop.set()
            hurry()


def _schedule(thread: int, policy: str) -> None:
    """Let the kernel run a thread by another policy, where it knows it."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))


def _mark() -> None:
    _inside.unit = True
    torch.set_num_threads(1)  # every thread has a number of its own


@contextmanager
def one_core_each() -> Iterator[None]:
    """Let each thread compute on one core while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
