# SPDX-License-Identifier: Apache-2.0
"""How much memory and time matching takes, from shapes alone. Memory is a matter of width and of the number of workers,
not of depth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch

from onebasin.engine import in_parallel
from onebasin.symmetry import Group, Signature
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.gemm import gemm
from onebasin.symmetry.groups.scaling import CHUNK, best_scale

from .components import Block, components_of

COPIES = 4  # of a tensor that is at work: the anchor's, the source's, the rewritten one, and a temporary of its size
QUARTIC = 20  # for a scale that is solved for: float64 temporaries of `best_scale`
MOMENTS = 8  # matrices of a space's size: moments of writers and readers, their sum and terms, what a solver works on


def numbers_held(
    signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], workers: int | None = None
) -> int:
    """Estimate how many numbers are in memory at most while models are matched and written: those of a few tensors.

    Of a layer every worker holds the tensors that one set of coupled heads touches, or a space that is visited again,
    or else one tensor, and the moments of the space that it solves; of what belongs to all layers, two tensors for
    every worker and the moments of all.

    Args:
        signature: Of the source.
        roles: The tensors that are matched.
        groups: Root space -> what may act.
        workers: How many pieces run at once (default: one per core).
    """
    counted = list(roles)
    count = workers or os.cpu_count() or 1
    present = {signature.root[leaf.space] for role in counted for leaf in signature.leaves(signature.tensors[role])}
    active = {root: group for root, group in groups.items() if root in present}
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    largest = max(sizes.values(), default=0)
    held = 2 * count * COPIES * largest  # distances, and writing
    for component in components_of(signature, counted, active):
        for block in component.blocks:
            touched = {role for root in block.roots for role in signature.touching[root]} & sizes.keys()
            shared = signature.spaces[block.root].layer is None
            kept = not shared and (block.inner or len(component.blocks) > 1)
            together = sum(sizes[role] for role in touched) if kept else largest
            moments = _moments(signature, block)
            scaled = any(not active[root].isometry for root in block.roots)
            solver = QUARTIC * min(CHUNK, moments) if scaled else 0
            held = max(held, (COPIES * together + MOMENTS * moments + solver) * (2 * count if shared else count))
    return held


def numbers_run(signature: Signature) -> int:
    """About how many numbers are in memory at most while a model and its copy run to be compared.

    Of weights only those that are being used, but all that the classes put together: the matrices of experts.
    """
    sizes = {role: prod(entry.shape) for role, entry in signature.tensors.items()}
    stacked = sum(sizes[role] for role, entry in signature.tensors.items() if len(entry.names) > 1)
    return 2 * stacked + COPIES * max(sizes.values(), default=0)


SWEEPS = (2, 30)  # over coupled spaces: fewest where the embeddings decide, most where they say little (seen: 1 to 40)
ORDERED = 5  # sweeps at most where all is permuted
GROWTH = 2.3  # exponent of assignment, between 1024 and 14,336 neurons
DISK = 1e9  # bytes a second
VISIT = 1e-3  # seconds to look at one tensor of both models, however small


@dataclass(frozen=True)
class Work:
    """products: FLOP of moments and of what is rewritten by matrices. factored, assigned: n^3 and n^`GROWTH`, over all
    matrices of size n of which a polar factor or an assignment is found. scaled: how many scales are solved for, tried
    ones included. visits: of a tensor of both models. numbers: read and written, of models as a whole."""

    products: float
    factored: float
    assigned: float
    scaled: float
    visits: float
    numbers: int


def work(signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], sweeps: int = 1) -> Work:
    """Count the operations of matching: one pass where no tensor joins two spaces that move, else `sweeps` of them.

    A space of n dimensions costs 2 n FLOP for every number that it touches, and as many where a tensor is rewritten by
    a matrix: at the end, and where spaces are coupled at every look. Heads with maps of their own are compared all with
    all: each of their numbers counts for every head, and every pair of them is solved. Neurons are assigned twice: then
    their order hardly changes, which is soon proved.

    Args:
        signature: Of the source.
        roles: The tensors that are matched.
        groups: Root space -> what may act.
        sweeps: How many passes over coupled spaces.
    """
    counted = list(roles)
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    on = {role: [signature.root[leaf.space] for leaf in signature.leaves(signature.tensors[role])] for role in counted}
    present = {root for roots in on.values() for root in roots}
    active = {root: group for root, group in groups.items() if root in present}
    n = {root: signature.spaces[root].size for root in active}
    turns = {root: not group.permutes and group.dimension(n[root]) > 1 for root, group in active.items()}
    rewriting = {role: 2.0 * sizes[role] * sum(n[root] for root in on[role] if turns.get(root)) for role in counted}
    products, factored, assigned, scaled, visits = sum(rewriting.values()), 0.0, 0.0, 0.0, 0.0
    for component in components_of(signature, counted, active):
        coupled = len(component.blocks) > 1
        turning = any(turns[root] for block in component.blocks for root in block.roots)
        rounds = 1 if not coupled else sweeps if turning else min(sweeps, ORDERED)
        looks = list(component.roles) if coupled else []  # for the distance
        for block in component.blocks:
            looks += [role for role in counted if any(role in signature.touching[root] for root in block.roots)]
            for root in block.roots:
                pairs = n[block.root] if root in block.inner else 1
                matrices = pairs * prod(signature.sizes[outer] for outer in signature.spaces[root].batch)
                touched = sum(sizes[role] for role in signature.touching[root] if role in sizes)
                if root in block.inner or not block.inner:
                    products += 2.0 * n[root] * touched * pairs * rounds
                permuted = active[root].permutes
                if turns[root]:
                    factored += float(n[root] ** 3 * matrices * rounds)
                if permuted:
                    assigned += n[root] ** GROWTH * matrices * min(rounds, 2)
                if not active[root].isometry:
                    scaled += float((n[root] ** 2 if permuted else 1) * matrices * rounds)
        products += coupled * rounds * sum(rewriting[role] for role in looks)
        visits += rounds * len(looks)
    return Work(products, factored, assigned, scaled, visits, 5 * sum(sizes.values()))  # both read twice, one written


def expected(
    signature: Signature,
    roles: Iterable[str],
    groups: Mapping[str, Group],
    itemsize: int = 4,
    workers: int | None = None,
) -> tuple[float, float]:
    """Estimate how many seconds matching takes on this machine, at best and at worst; shapes do not tell which it is.

    Args:
        signature: Of the source.
        roles: The tensors that are matched.
        groups: Root space -> what may act.
        itemsize: Bytes of a number in the mathematics.
        workers: How many pieces run at once (default: one per core).

    Returns:
        Seconds for models that are near, whose neurons provably stay, and for others, which need many sweeps.
    """
    near, far = (work(signature, roles, groups, sweeps) for sweeps in SWEEPS)
    return seconds(replace(near, assigned=0.0), itemsize, workers), seconds(far, itemsize, workers)


def seconds(found: Work, itemsize: int = 4, workers: int | None = None) -> float:
    """About how long that takes so many workers here, at the rates of this machine's products and solvers."""
    cores = os.cpu_count() or 1
    product, factor, assign, scale = _rates(min(workers or cores, cores))
    computed = found.products / product + found.factored / factor + found.assigned / assign + found.scaled / scale
    return computed + VISIT * found.visits + found.numbers * itemsize / DISK


@cache
def _rates(workers: int) -> tuple[float, float, float, float]:
    """Per second: FLOP of products, n^3 of polar factors, n^`GROWTH` of assignments, and scales. Takes some tenths."""
    square, many, four = torch.rand(512, 512), torch.rand(8, 64, 64), torch.rand(4, CHUNK)
    large = torch.rand(1024, 1024)
    products = _rate(workers, 2 * 512**3, lambda: gemm(square, square))
    factored = _rate(workers, 8 * 64**3, lambda: torch.linalg.svd(many))
    assigned = _rate(workers, 1024**GROWTH, lambda: assignment(large), 1)
    return products, factored, assigned, _rate(workers, four.shape[1], lambda: best_scale(*four), 1)


def _rate(workers: int, work: float, run: Callable[[], object], repeats: int = 3) -> float:
    """Work a second where every worker has a run of its own, as matching gives it: threads that share one wait for each
    other wherever something else is running, too."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        in_parallel(lambda _: run(), range(workers), workers)
        found.append(time.perf_counter() - start)
    return workers * work / min(found)


def _moments(signature: Signature, block: Block) -> int:
    """Entries of the moments of a block: with inner spaces, those of all pairs of its blocks."""

    def entries(root: str) -> int:
        space = signature.spaces[root]
        return int(space.size**2 * prod(signature.sizes[outer] for outer in space.batch))

    blocks = signature.spaces[block.root].size
    return sum(blocks * entries(root) for root in block.inner) or entries(block.root)
