# SPDX-License-Identifier: Apache-2.0
"""What no implementation of the same steps can undercut on this machine, measured in the same run.

floor = FLOPs of all GEMMs / the largest GEMM rate + LAPACK's SVDs alone + the assignments alone, on the very matrices
that matching met and on as many cores + both models read and the result written once at the speed of a copy. The GEMMs
are the cross-moments, whole even where a few columns prove that nothing moves, and what rotates the result, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from onebasin.engine import in_order
from onebasin.matching import coordinate_descent as descent
from onebasin.matching.moments import Pair, cross_moments, pairwise_moments
from onebasin.symmetry import Group, Moments, Signature
from onebasin.symmetry.groups import Orthogonal, OrthogonalFixingOnes, Permutation, Rotary, ScaledOrthogonal
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.gemm import gemm
from onebasin.symmetry.tables.axes import blocks

ROTATIONS = (Orthogonal, OrthogonalFixingOnes, ScaledOrthogonal)  # whose nearest element is a polar factor
Clock = Callable[[], float]
Result = TypeVar("Result")


@dataclass
class Floor:
    """Seconds of each ingredient. flops: of all cross-moments. rotations: space -> FLOPs of rotating by what was
    found."""

    flops: int = 0
    rotations: dict[str, int] = field(default_factory=dict)
    gemm: float = 0.0
    svd: float = 0.0
    assignment: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.svd + self.assignment + self.memory


@dataclass(frozen=True)
class Machine:
    """gemm: FLOP/s of the fastest square float32 GEMM. copy: bytes read and written per second."""

    gemm: float
    copy: float


def measure(clock: Clock = time.perf_counter, sizes: tuple[int, ...] = (512, 1024, 2048, 4096)) -> Machine:
    """Best of five for each size of GEMM, by either library, and of five copies of 256 MB."""
    rates = []
    for n in sizes:
        a, b, out = (torch.ones(n, n) for _ in range(3))
        for form in (partial(torch.mm, a, b, out=out), partial(gemm, a, b)):
            rates.append(2 * n**3 / min(timed(form, clock)[0] for _ in range(5)))
    source, target = torch.ones(2, 64 << 20)
    return Machine(max(rates), 2 * source.nbytes / min(timed(lambda: target.copy_(source), clock)[0] for _ in range(5)))


def timed(job: Callable[[], Result], clock: Clock) -> tuple[float, Result]:
    """Seconds and result of a job."""
    start = clock()
    result = job()
    return clock() - start, result


@contextmanager
def tracing(groups: Mapping[str, Group], clock: Clock) -> Iterator[Floor]:
    """While this is open, matching adds the FLOPs of every step to the floor; once it closes the solvers are timed.

    They run alone on the very matrices that they met, one on every core, as matching runs them.
    """
    floor = Floor()
    svds: list[Callable[[], object]] = []
    assignments: list[Callable[[], object]] = []

    def one(signature: Signature, root: str, roles: list[str], gram: bool, same: bool, read: Any, run: Any) -> Moments:
        moments = cross_moments(signature, root, roles, gram, same, read, run)
        # A rotary pair of dimensions needs its own four products alone, and no solver.
        size = 2 if isinstance(groups[root], Rotary) else signature.spaces[root].size
        products = _flops(signature, root, size, map(read, roles))
        floor.flops += products
        if isinstance(groups[root], Permutation):
            assignments.append(partial(assignment, moments.total))
        elif isinstance(groups[root], ROTATIONS):
            svds.append(partial(torch.linalg.svd, moments.total))
            floor.rotations[root] = products  # n products for every entry, as the cross-moments take
        return moments

    def all_pairs(signature: Signature, outer: str, inner: str, found: Iterable[Pair], *how: bool) -> Moments:
        pairs = list(found)
        moments = pairwise_moments(signature, outer, inner, pairs, *how)
        size = signature.spaces[inner].size
        products = _flops(signature, inner, size, pairs)
        floor.flops += signature.spaces[outer].size * products
        total = moments.total
        if not isinstance(groups[inner], Permutation):
            floor.rotations[inner] = products
            svds.append(partial(torch.linalg.svdvals, total))
            svds.append(partial(torch.linalg.svd, total.diagonal(dim1=0, dim2=1).movedim(-1, 0)))
        return moments

    replaced = {"cross_moments": one, "pairwise_moments": all_pairs, "proved": lambda *_: None}
    with patch.multiple(descent, **replaced):
        yield floor
    workers = torch.get_num_threads()
    floor.svd = min(timed(lambda: [*in_order(_call, svds, workers)], clock)[0] for _ in range(2))
    floor.assignment = timed(lambda: [*in_order(_call, assignments, workers)], clock)[0]


def _call(job: Callable[[], object]) -> None:
    job()


def finish(floor: Floor, machine: Machine, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> Floor:
    """The floor with its GEMM and memory seconds filled in."""
    floor.gemm = (floor.flops + sum(floor.rotations.values())) / machine.gemm
    floor.memory = 3 * sum(anchor.nbytes for anchor, _ in tensors.values()) / machine.copy
    return floor


def _flops(signature: Signature, root: str, size: int, pairs: Iterable[Pair]) -> int:
    """2 n per entry of every view that has the space on a dimension: A S^T of (n, m) with (n, m), n the size."""
    total = 0
    for role, anchor, _, _ in pairs:
        for piece, leaves in blocks(anchor, signature.tensors[role].axes, signature.sizes):
            total += sum(2 * size * piece.numel() for leaf in leaves if signature.root.get(leaf.space) == root)
    return total
