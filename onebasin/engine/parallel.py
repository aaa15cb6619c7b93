# SPDX-License-Identifier: Apache-2.0
"""Independent units of work in threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

from .memory import return_freed

T = TypeVar("T")
R = TypeVar("R")
TIMES, CLEARLY = 2, 0.8  # how often work is done to time it; less than this share of time is clearly faster
_inside = threading.local()  # marks threads that run a unit: nested calls run in line


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> Iterator[R]:
    """Yield function(item) for every item, in order, computed in threads; at most one result per worker waits.

    Threads are enough: GEMM, SVD and assignment release the interpreter lock. Each unit runs its linear algebra on one
    core, so results have the same bits for any number of workers. The first exception is raised. After a unit, freed
    memory is returned to the system.

    Args:
        function: Computes one unit.
        items: Its arguments, one per unit.
        workers: Number of threads (default: one per core).
    """
    count = workers or os.cpu_count() or 1

    def unit(item: T) -> R:
        result = function(item)
        return_freed()
        return result

    with threads(1):
        if count == 1 or getattr(_inside, "unit", False):
            yield from map(unit, items)
            return
        pool, waiting = _pool(count), deque[Future[R]]()
        try:
            for item in items:
                waiting.append(pool.submit(unit, item))
                if len(waiting) > 2 * count - 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            wait([future for future in waiting if not future.cancel()])


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Return threads that stay, since starting them takes longer than many a unit."""
    return ThreadPoolExecutor(count, initializer=_mark)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def behind(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Call function(item) for every item, in order, in one thread, while the caller's thread produces the items.

    The producer is one item ahead. The first exception of either thread is raised.
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
    """Run function(stop) in a thread while the block runs; yield a call that waits for its result.

    Args:
        function: Should return soon after `stop` is set, which happens when the block ends.
        patient: Run only on idle cores until somebody waits for the result (Linux only).
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
    """Set a thread's scheduling policy, where the system supports it."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))


def _mark() -> None:
    _inside.unit = True
    torch.set_num_threads(1)  # this setting is per thread


def fastest_threads(work: Callable[[], object]) -> tuple[int, float]:
    """Return how many threads to compute with, and the seconds that some work takes with them: all, or one if it is
    clearly faster alone.

    Beside other programs, threads that share an operation wait for the slowest, and may take three times as long as
    one. Do the work once before, since the first time takes longer.
    """

    def seconds(count: int) -> float:
        with threads(count):
            begun = time.perf_counter()
            for _ in range(TIMES):
                work()
            return (time.perf_counter() - begun) / TIMES

    every = torch.get_num_threads()
    together = seconds(every)
    alone = seconds(1) if every > 1 else together
    return (1, alone) if alone < CLEARLY * together else (every, together)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run linear algebra on some cores while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
