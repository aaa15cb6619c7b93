# SPDX-License-Identifier: Apache-2.0
"""Independent units of work as tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
RETRIES = 3  # runs of a unit after its worker was lost


def on_ray(function: Callable[[T], R], items: Iterable[T], address: str) -> Iterator[R]:
    """Yield function(item) for every item, in order, each as a Ray task on one core.

    Args:
        function: A function that can be pickled. Where a worker is lost, its units run again.
        items: The function's arguments, one per unit.
        address: Address of a running cluster, or `local` for one on this machine that ends with the program.

    Raises:
        ValueError: Ray is not installed, or the cluster cannot be reached.
        Exception: The first error of a unit; the remaining units are cancelled.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'onebasin[ray]'") from None
    if not ray.is_initialized():
        try:
            # The caller's working folder is not shipped to the workers: all files are on shared paths.
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"--ray {address}: there is no such cluster ({str(error).splitlines()[0]})") from None
    task: Any = ray.remote(num_cpus=1, max_retries=RETRIES)(_alone)
    shared = ray.put(function)
    waiting = [task.remote(shared, item) for item in items]
    done = 0
    try:
        for reference in waiting:
            try:
                yield ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            done += 1
    finally:
        for reference in waiting[done:]:
            ray.cancel(reference)
        if waiting[done:]:
            ray.wait(waiting[done:], num_returns=len(waiting) - done)


def _alone(function: Callable[[T], R], item: T) -> R:
    torch.set_num_threads(1)
    return function(item)
