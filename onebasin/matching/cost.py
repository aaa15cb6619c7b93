# SPDX-License-Identifier: Apache-2.0
"""How much memory and time matching takes, from shapes alone. Memory is a matter of width and of the number of workers,
not of depth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from onebasin.symmetry import Group, Signature
from onebasin.symmetry.assignment import assignment
from onebasin.symmetry.groups import ISOMETRIES
from onebasin.symmetry.groups.scaling import CHUNK

from .weights import _components, _Unit

COPIES = 4  # of a tensor that is at work: the anchor's, the source's, the rewritten one, and a temporary of its size
QUARTIC = 60  # for a scale that is solved for: float64 temporaries of `best_scale`
MOMENTS = 8  # matrices of a space's size: moments of writers and readers, their sum and terms, what a solver works on


def numbers_held(
    signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], workers: int | None = None
) -> int:
    """About how many numbers are in memory at most while models are matched and written: what a few tensors take.

    Of a layer every worker holds the tensors that one set of coupled heads touches, or else one tensor, and the moments
    of the space that it solves; of what belongs to all layers, two tensors for every worker and the moments of all.
    """
    counted = list(roles)
    count = workers or os.cpu_count() or 1
    present = {signature.root[leaf.space] for role in counted for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    largest = max(sizes.values(), default=0)
    held = 2 * count * COPIES * largest  # distances, and writing
    for component in _components(signature, counted, active):
        for unit in component.units:
            touched = {role for root in (unit.root, *unit.inner) for role in signature.touching[root]} & sizes.keys()
            shared = signature.spaces[unit.root].layer is None
            together = sum(sizes[role] for role in touched) if unit.inner and not shared else largest
            moments = _moments(signature, unit)
            scaled = any(not isinstance(active[root], ISOMETRIES) for root in (unit.root, *unit.inner))
            solver = QUARTIC * min(CHUNK, moments) if scaled else 0
            held = max(held, (COPIES * together + MOMENTS * moments + solver) * (2 * count if shared else count))
    return held


SWEEPS = 15  # over spaces that are coupled, until nothing improves: small models took 5 to 40
DISK = 5e8  # bytes a second


@dataclass(frozen=True)
class Work:
    """products: FLOP of moments and of what is rewritten by matrices. factored, assigned: n^3, over all matrices of
    size n of which a polar factor or an assignment is found. numbers: read and written, of models as a whole."""

    products: float
    factored: float
    assigned: float
    numbers: int


def work(signature: Signature, roles: Iterable[str], groups: Mapping[str, Group]) -> Work:
    """What matching is made of: one pass where no tensor joins two spaces that move, else `SWEEPS`.

    A space of n dimensions costs 2 n FLOP for every number that it touches. Heads with maps of their own are compared
    all with all: each of their numbers counts for every head, and every pair of them is solved.
    """
    counted = list(roles)
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    present = {signature.root[leaf.space] for role in counted for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    products = factored = assigned = 0.0
    for component in _components(signature, counted, active):
        sweeps = 1 if len(component.units) == 1 else SWEEPS
        for unit in component.units:
            pairs = signature.spaces[unit.root].size if unit.inner else 1
            for root in unit.inner or (unit.root,):
                n = signature.spaces[root].size
                copies = prod(signature.sizes[outer] for outer in signature.spaces[root].batch)
                touched = sum(sizes[role] for role in signature.touching[root] if role in sizes)
                turns = active[root].dimension(3) > 0  # its elements are matrices, with which tensors are multiplied
                products += 2.0 * n * touched * (sweeps * pairs + turns)
                cubes = float(n**3) * copies * pairs * sweeps
                factored, assigned = factored + cubes * turns, assigned + cubes * (not turns)
    return Work(products, factored, assigned, 5 * sum(sizes.values()))  # both read twice, one written


def seconds(found: Work, itemsize: int = 4) -> float:
    """About how long that takes here, at the rates of this machine's products and singular value decompositions."""
    product, factor, assign = _rates()
    computed = found.products / product + found.factored / factor + found.assigned / assign
    return computed + found.numbers * itemsize / DISK


@cache
def _rates() -> tuple[float, float, float]:
    """FLOP of products, and n^3 of polar factors and of assignments a second, measured in some hundredths of one."""
    square, many = torch.rand(512, 512), torch.rand(8, 64, 64)
    products = 2 * 512**3 / _best(lambda: square @ square)
    factored = 8 * 64**3 / _best(lambda: torch.linalg.svd(many))
    return products, factored, 512**3 / _best(lambda: assignment(square))


def _best(run: Callable[[], object], repeats: int = 3) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _moments(signature: Signature, unit: _Unit) -> int:
    """Entries of the moments of a unit: with inner spaces, those of all pairs of its blocks."""

    def entries(root: str) -> int:
        space = signature.spaces[root]
        return int(space.size**2 * prod(signature.sizes[outer] for outer in space.batch))

    blocks = signature.spaces[unit.root].size
    return sum(blocks * entries(root) for root in unit.inner) or entries(unit.root)
