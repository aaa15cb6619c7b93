# SPDX-License-Identifier: Apache-2.0
"""Units of work as Ray tasks, on any number of nodes that see the same files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
RETRIES = 3  # of a unit whose worker is lost


def on_ray(function: Callable[[T], R], items: Iterable[T], address: str) -> Iterator[R]:
    """Yield function(item) for every item, in order, each as a Ray task of one core.

    Args:
        function: Something that can be pickled.
        items: Its arguments; the units of a lost worker are run again.
        address: Of a running cluster, or `local` for one on this machine that ends with the program.

    Raises:
        ValueError: Ray is not installed, or the cluster is not there. An error of a unit is raised, too, and ends the
            rest.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'onebasin[ray]'") from None
    if not ray.is_initialized():
        try:
            # Workers inherit nothing of the caller's working folder: the files are on shared paths.
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
