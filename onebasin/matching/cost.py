# SPDX-License-Identifier: Apache-2.0
"""The memory and time of matching, estimated from shapes alone. Memory depends on the width and the number of workers,
not on the depth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from math import prod

import torch

from onebasin.engine import threads
from onebasin.symmetry import Group, Signature
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.gemm import gemm
from onebasin.symmetry.groups.procrustes import polar
from onebasin.symmetry.groups.scaling import CHUNK, factor_gain

from .components import Block, components_of, present, workers_for
from .order_proof import provable

PASSING = 3  # copies of a tensor that is read, rewritten and dropped: the anchor's, the source's, the rewritten one
COPIES = 4  # of one among others that are kept while a layer is solved: these, and a temporary of its size
WAITING = 2  # results per worker that are not yet added up; and tensors, whoever made them, that wait to be written
QUARTIC = 20  # per scale to solve for: temporaries of `factor_gain`, or of `best_scale` in float64
MOMENTS = 8  # matrices of a space's size: moments of writers and readers, their sum and terms, a solver's temporaries
SCORES = 3  # of many neurons: moments of writers and of readers, and the score; both at once where only orders move


def numbers_held(
    signature: Signature,
    roles: Iterable[str],
    groups: Mapping[str, Group],
    workers: int | None = None,
    near: bool = False,
) -> int:
    """Estimate how many numbers are in memory at most while models are matched and written: those of a few tensors.

    For the spaces of a layer, every worker has a tensor in use, the moments of the space that it solves, and both
    models' tensors that are touched by a set of coupled heads, or by a space that is visited again. For spaces of all
    layers, every worker has a tensor in use and moments that wait, which are then solved together. Tensors pass in
    order, so that two embeddings with layers between them are never in use at once, except for the start of a descent.

    workers: how many pieces run at once (default: one per core). near: whether a few columns prove the neurons' order.
    """
    counted = list(roles)
    count = workers or os.cpu_count() or 1
    active = present(signature, counted, groups)
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    held = _passing([*sizes.values()], count, written=True)
    for component in components_of(signature, counted, active):
        for block in component.blocks:
            touched = {role for root in block.roots for role in signature.touching[root]} & sizes.keys()
            largest = max(sizes[role] for role in touched)
            shared = signature.spaces[block.root].layer is None
            kept = not shared and (block.inner or len(component.blocks) > 1)
            tensors = COPIES * largest + (2 * (sum(sizes[role] for role in touched) - largest) if kept else 0)
            passing = [role for role in counted if role in touched]
            first = [role for role in passing if _starts(signature, role, block, active)]
            many = provable(signature, block, active)
            moments = 0 if many and near else _moments(signature, block)
            scaled = any(not active[root].isometry for root in block.roots)
            matrices = SCORES - (not (kept or scaled)) if many else MOMENTS
            solving = matrices * moments + (QUARTIC * min(CHUNK, moments) if scaled else 0)
            if shared:
                most = max(_passing([sizes[role] for role in some], count) for some in (passing, first))
                held = max(held, most + count * WAITING * moments + solving)
            else:
                held = max(held, count * (tensors + solving))
    return held


def _passing(sizes: list[int], count: int, written: bool = False) -> int:
    """Return how many numbers are in memory at most while tensors of these sizes pass, in order, through so many
    workers. written: whether the results are tensors too, which then wait to be written."""
    ahead = (2 * count if count > 1 else 1) + WAITING * written

    def held(some: list[int]) -> int:
        falling = sorted(some, reverse=True)
        return PASSING * sum(falling[:count]) + written * sum(falling[count:])

    return max((held(sizes[at : at + ahead]) for at in range(len(sizes))), default=0)


def _starts(signature: Signature, role: str, block: Block, active: Mapping[str, Group]) -> bool:
    """Return whether a descent starts from a tensor: a matrix on which nothing else moves."""
    entry = signature.tensors[role]
    roots = {signature.root[leaf.space] for leaf in signature.leaves(entry)}
    return len(entry.axes) > 1 and not (roots & active.keys()) - set(block.roots)


def numbers_run(signature: Signature) -> int:
    """Estimate how many numbers are in memory at most while a model and its copy run to be compared.

    These are the weights in use, and all weights that the classes assemble: the matrices of experts.
    """
    sizes = {role: prod(entry.shape) for role, entry in signature.tensors.items()}
    stacked = sum(sizes[role] for role, entry in signature.tensors.items() if len(entry.names) > 1)
    return 2 * stacked + COPIES * max(sizes.values(), default=0)


SWEEPS = (3, 40)  # over coupled spaces: for copies (the last changes nothing), and the most seen for other models
ORDERED = 5  # most sweeps if the spaces of all layers are only permuted
GROWTH = 2.3  # exponent of assignment, between 1024 and 14,336 neurons
SMALL = 96  # dimensions up to which polar factors are iterated in batches
PROVING = 8  # passes over the numbers of neurons, and over pairs of neurons, that prove their order (`order_proof`)
VISIT = 1e-3  # seconds to visit a tensor of both models, however small
HEADS = 0.1  # seconds to solve the heads of one layer, however few, where several share keys and values
ALONE = 0.4  # of that, where none do
ENDS = 3  # how often all tensors are rewritten after the search: for the distance, to verify, and to write
SLOWER = 1.3  # how much longer each operation takes in matching than alone
PROGRAM = 5.0  # seconds to load the libraries, classes and tiny models that a job needs, on one core


@dataclass(frozen=True)
class Work:
    """products: FLOP of moments and of rewriting by matrices. factored, wide: the sum of n^3 over all matrices of which
    a polar factor is computed, up to `SMALL` and larger. assigned: the sum of n^`GROWTH` over all assignments. scaled:
    pairs of neurons for which a scale is computed. visits: of a tensor of both models. blocks: layers whose heads are
    solved together, which count for `ALONE` where no keys and values are shared. numbers: that are read."""

    products: float = 0.0
    factored: float = 0.0
    wide: float = 0.0
    assigned: float = 0.0
    scaled: float = 0.0
    visits: float = 0.0
    blocks: float = 0.0
    numbers: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> Work:
        return Work(*(count * each for each in astuple(self)))


def work(
    signature: Signature, roles: Iterable[str], groups: Mapping[str, Group], sweeps: int = 1, near: bool = False
) -> Work:
    """Count the operations of matching: one pass if no tensor joins two spaces that move, else `sweeps` of them.

    A space of n dimensions costs 2 n FLOP for every number that it touches, and as many where a tensor is rewritten by
    a matrix: for the distance at the end, to verify, to write, and in every sweep over coupled spaces, once for each
    set of a layer's spaces. Heads with maps of their own are all compared with each other: each of their numbers counts
    for every head, and a problem is solved for every pair of heads, or of members in groups of heads. Neurons are
    assigned twice: after that, their order hardly changes, which is soon proved.

    sweeps: the number of passes over coupled spaces. near: whether a few columns prove the order of neurons.
    """
    counted = list(roles)
    sizes = {role: prod(signature.tensors[role].shape) for role in counted}
    on = {role: [signature.root[leaf.space] for leaf in signature.leaves(signature.tensors[role])] for role in counted}
    active = present(signature, counted, groups)
    turning = {root: signature.spaces[root].size for root, group in active.items() if _turns(group, signature, root)}

    def looked(role: str, without: Collection[str] = ()) -> Work:
        """Return the work of reading both tensors of a role, and of rewriting the source's except on some spaces."""
        flop = 2.0 * sizes[role] * sum(turning.get(root, 0) for root in on[role] if root not in without)
        return Work(products=flop, visits=1, numbers=2.0 * sizes[role])

    whole = sum((looked(role).times(ENDS) for role in counted), Work())
    for component in components_of(signature, counted, active):
        coupled = len(component.blocks) > 1
        wide = {root for block in component.blocks for root in block.roots if signature.spaces[root].layer is None}
        turns = bool(wide & turning.keys())
        rounds = 1 if not coupled else sweeps if turns else min(sweeps, ORDERED)
        read: set[str] = set()
        for block in component.blocks:
            touched = [role for role in counted if any(role in signature.touching[root] for root in block.roots)]
            shared = signature.spaces[block.root].layer is None
            looks = [looked(role, block.roots if shared or not coupled else ()) for role in touched]
            whole += sum(looks, _solved(signature, block, active, sizes, near)).times(rounds)
            if not (near and provable(signature, block, active)):
                whole += _assigned(signature, block, active).times(min(rounds, 2))
            read |= set() if shared else set(touched)
        if coupled:  # for the distance
            whole += sum((looked(role) for role in component.roles if role not in read), Work()).times(rounds)
    return whole


def _turns(group: Group, signature: Signature, root: str) -> bool:
    return not group.permutes and group.dimension(signature.spaces[root].size) > 1


def _solved(
    signature: Signature, block: Block, active: Mapping[str, Group], sizes: Mapping[str, int], proving: bool
) -> Work:
    """Return the work of a block's moments and of solving them once. proving: whether a few columns prove an order."""
    n = {root: signature.spaces[root].size for root in block.roots}
    touched = {root: sum(sizes.get(role, 0) for role in signature.touching[root]) for root in n}
    if proving and provable(signature, block, active):
        return Work(numbers=PROVING * (touched[block.root] + float(n[block.root]) ** 2))
    members = n[block.member] ** 2 if block.member else 1
    found = Work(blocks=any(n[root] > 1 for root in block.inner) * (1 if block.member else ALONE))
    for root, size in n.items():
        pairs, matrices = _matrices(signature, block, root)
        if root in block.inner or not block.inner:
            found += Work(products=2.0 * size * touched[root] * pairs)
        if not active[root].permutes and active[root].dimension(size) > size:  # not a rotary map: it has a closed form
            cubes = float(size**3 * matrices)
            found += Work(wide=cubes) if size > SMALL else Work(factored=cubes * members)
        if not active[root].isometry and (size == 1 or active[root].permutes):
            found += Work(scaled=float(size**2 * matrices))
    return found


def _assigned(signature: Signature, block: Block, active: Mapping[str, Group]) -> Work:
    found = 0.0
    for root in block.roots:
        if active[root].permutes:
            found += signature.spaces[root].size ** GROWTH * _matrices(signature, block, root)[1]
    return Work(assigned=found)


def _matrices(signature: Signature, block: Block, root: str) -> tuple[int, int]:
    """Return the number of spaces with which each one of a root is compared, and of matrices solved for all of it."""
    pairs = signature.spaces[block.root].size if root in block.inner else 1
    return pairs, pairs * prod(signature.sizes[outer] for outer in signature.spaces[root].batch)


def expected(
    signature: Signature,
    roles: Iterable[str],
    groups: Mapping[str, Group],
    itemsize: int = 4,
    workers: int | None = None,
) -> tuple[float, float]:
    """Estimate how many seconds matching takes on this machine, at best and at worst.

    The first is for copies and models that are near each other, whose neurons are soon found, the second for others,
    which need many sweeps. Shapes alone do not tell which they are.

    itemsize: bytes of a number in the arithmetic. workers: how many pieces run at once (default: one per core).
    """
    near, far = (
        work(signature, roles, groups, sweeps, proving) for sweeps, proving in zip(SWEEPS, (True, False), strict=True)
    )
    count = workers_for(signature, workers)
    return seconds(near, itemsize, count), seconds(far, itemsize, count)


def seconds(found: Work, itemsize: int = 4, workers: int | None = None) -> float:
    """Estimate how long this takes with so many workers, each on its own core, at this machine's rates."""
    cores = os.cpu_count() or 1
    parts = zip(astuple(found), astuple(_rates()), strict=True)
    shared: float = SLOWER * sum(amount / rate for amount, rate in parts) * itemsize / 4
    return PROGRAM + shared / min(workers or cores, cores)


@cache
def _rates() -> Work:
    """Measure the rates of one core, per second of its time, on which other programs have little influence. This takes
    some tenths of a second."""
    square, many, four = torch.rand(1024, 1024), torch.rand(8, 64, 64), torch.rand(4, CHUNK)
    stored = torch.rand(1 << 24).bfloat16()  # its conversion allocates fresh memory, as with large tensors
    return Work(
        products=_rate(2 * 1024**3, lambda: gemm(square, square)),
        factored=_rate(8 * 64**3, lambda: polar(many)),
        wide=_rate(512**3, lambda: polar(square[:512, :512])),
        assigned=_rate(1024**GROWTH, lambda: assignment(square)),
        scaled=_rate(four.shape[1], lambda: factor_gain(*four)),
        visits=1 / VISIT,
        blocks=1 / HEADS,
        numbers=_rate(len(stored), lambda: stored.float().mul_(2)),
    )


def _rate(amount: float, run: Callable[[], object]) -> float:
    """Return the work per second of one thread's CPU time."""
    with threads(1):
        return amount / min(_taken(run) for _ in range(3))


def _taken(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _moments(signature: Signature, block: Block) -> int:
    """Return the number of entries of a block's moments: with inner spaces, for all pairs of its heads."""

    def entries(root: str) -> int:
        space = signature.spaces[root]
        return int(space.size**2 * prod(signature.sizes[outer] for outer in space.batch))

    blocks = signature.spaces[block.root].size
    return sum(blocks * entries(root) for root in block.inner) or entries(block.root)
