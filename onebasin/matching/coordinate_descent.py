# SPDX-License-Identifier: Apache-2.0
"""Block coordinate descent on coupled spaces: each is set to its exact optimum given the others, until none moves.

At every visit, tensors are read again and rewritten by the alignment so far, so each step is an increment to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebasin.engine import Store, in_order
from onebasin.models.distance import squared_distance
from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.groups import GroupedWreath, Wreath
from onebasin.symmetry.groups.elements import Element, Linear

from .components import Block, Component
from .matched import Matched
from .moments import (
    Pair,
    as_matrix,
    carried,
    cross_moments,
    evened,
    grouped_moments,
    member_gains,
    outer_moments,
    pairwise_moments,
    perturbed,
)
from .nested import nearest_nested, twice
from .order_proof import provable, proved

if TYPE_CHECKING:
    from .weights import Weights

Read = Callable[[str], tuple[Tensor, Tensor]]  # role -> (anchor, source)
NEAR = 30.0  # times the tolerance: after a sweep that gained no more than this, the next is likely to be the last


@dataclass(frozen=True)
class Run:
    """How weight matching is run. None of this changes the alignment.

    workers: how many independent pieces run at once (default: as in `workers_for`, else one per core). ray: the address
    of a Ray cluster whose tasks they are instead. progress: called with a text and the objective after every step.
    store: keeps the result of every piece, and the state of coupled spaces after every sweep, to continue from them.
    measure: False omits the distance before any move for closed forms; their objective then starts at 0.
    """

    workers: int | None = None
    ray: str | None = None
    progress: Callable[[str, float], None] | None = None
    store: Store | None = None
    measure: bool = True


@dataclass
class CoordinateDescent:
    """The descent on one component, from the start of a number or from an alignment."""

    signature: Signature
    component: Component
    read: Read
    groups: Mapping[str, Group]
    how: Weights
    run: Run
    number: int
    start: Alignment | None

    def __post_init__(self) -> None:
        signature, component = self.signature, self.component
        self.noise = torch.Generator().manual_seed(self.how.seed + self.number) if self.number > 1 else None
        weigh = (lambda role: self.how.weigh(role, *self.read(role))) if self.how.relative else self.how.weight
        self.weight = {role: weigh(role) for role in component.roles}
        self.batch = {root: signature.spaces[root].batch for block in component.blocks for root in block.roots}
        given = self.start.elements if self.start else {}
        self.total = Alignment({root: given[root] for root in self.batch if root in given}, self.batch)
        self.touching = {
            root: [role for role in component.roles if role in set(signature.touching[root])] for root in self.batch
        }
        self.twice = {
            root for root, roles in self.touching.items() if any(twice(signature, each, [root]) for each in roles)
        }
        self.before: dict[str, float] = {}
        self.objective: list[float] = []
        self.seen: dict[str, float] | None = None  # distances by role, if they are recorded, until the next change

    @property
    def kept(self) -> str:
        """The name of its state in the store."""
        return f"{self.component.name}, start {self.number}, warm {self.start is not None}"

    def descend(self) -> None:
        """Find the optimum of a single block, or sweep over coupled ones."""
        blocks, measure, store = self.component.blocks, self.run.measure, self.run.store
        closed = len(blocks) == 1 and not self.twice
        if store and not closed and (path := store.find(self.kept)):
            found = Matched.load(path)
            self.total, self.before, self.objective = found.alignment, found.apart, found.objective
            return self._sweep()
        self.before = self._distances() if measure or not closed else {}
        self.objective = [sum(self.before.values())]
        if closed:  # the moments determine the gain
            elements, gain = self._best(blocks[0])
            self.total = Alignment(elements, self.batch).after(self.total)
            self.objective.append(max(self.objective[0] - gain, 0.0) if measure else -gain)
            return None
        if self.start is None:
            self._start()
            self.objective = []
        return self._sweep()

    def _sweep(self) -> None:
        """Sweep until the objective stops decreasing, and store the state after every sweep.

        The objective after a sweep is measured while the next one reads and rewrites its first tensors, unless the
        sweep is likely to be the last.
        """
        first, *rest = self._waves()
        done = max(len(self.objective) - 1, 0)
        while True:
            known = len(self.objective) > done
            ahead = None
            if not (known or self._near(done, NEAR)):
                self.seen = {}
                ahead = self._solve(first)
            if not known:
                self._measure()
            if self._near(done):
                return
            self._apply(self._solve(first) if ahead is None else ahead)
            for wave in rest:
                self._apply(self._solve(wave))
            done += 1

    def _near(self, done: int, times: float = 1.0) -> bool:
        """Whether no more sweeps are allowed, or the last known decrease was within `times` the tolerance."""
        if done >= self.how.max_sweeps or len(self.objective) < 2:
            return done >= self.how.max_sweeps
        before, now = self.objective[-2:]
        return before - now <= times * self.how.tolerance * before

    def _measure(self) -> None:
        """Record the objective of the current state, and store the state after a sweep."""
        self.objective.append(sum(self._distances().values()))
        if len(self.objective) == 1:
            return
        if self.run.store:
            state = Matched(self.total, sum(self.before.values()), self.objective, self.before)
            self.run.store.put(self.kept, state.save)
        if self.run.progress:
            self.run.progress(f"sweep {len(self.objective) - 1}", self.objective[-1])

    def finish(self) -> Matched:
        """Project the accumulated elements back onto their groups in float64."""
        exact = {root: self.groups[root].project(element) for root, element in self.total.elements.items()}
        return Matched(Alignment(exact, self.batch), sum(self.before.values()), self.objective, self.before)

    def _waves(self) -> list[list[Block]]:
        """Return the blocks in order, with successive ones that share no tensor together: layers, given the stream."""
        waves: list[tuple[list[Block], set[str]]] = []
        for block in self.component.blocks:
            mine = {role for root in block.roots for role in self.touching[root]}
            if waves and not waves[-1][1] & mine:
                waves[-1][0].append(block)
                waves[-1][1].update(mine)
            else:
                waves.append(([block], mine))
        return [blocks for blocks, _ in waves]

    def _distances(self) -> dict[str, float]:
        """Return weighted squared distances by role; those in `seen` are not measured again."""
        seen = self.seen or {}

        def distance(role: str) -> float:
            return seen[role] if role in seen else self._distance(self._pair(role))

        roles = self.component.roles
        return dict(zip(roles, in_order(distance, roles, self.run.workers), strict=True))

    def _distance(self, pair: Pair) -> float:
        _, anchor, source, weight = pair
        return weight * squared_distance(anchor, source)

    def _pair(self, role: str, without: str | None = None) -> Pair:
        """Return the tensors of a role, the source's rewritten by the alignment so far, except on the space
        `without`."""
        anchor, source = self.read(role)
        found = {root: element for root, element in self.total.elements.items() if root != without}
        return role, anchor, Alignment(found, self.batch).apply(self.signature, role, source), self.weight[role]

    def _pairs(self, block: Block) -> Callable[[Iterable[str]], Iterable[Pair]]:
        """Return a function from roles to pairs. Those of a layer are kept in memory while it is solved, others are
        read when they are used."""
        if self.signature.spaces[block.root].layer is None:
            return partial(map, self._pair)
        mine = dict.fromkeys(role for root in block.roots for role in self.touching[root])
        held = {role: self._pair(role) for role in mine}
        if self.seen is not None:
            self.seen.update({role: self._distance(pair) for role, pair in held.items()})
        return partial(map, held.__getitem__)

    def _start(self) -> None:
        """Place the spaces shared by all layers one after another, each from the tensors whose other axes are placed.

        First come tensors with an axis in a fixed space (token, position, patch, class tables), then those that depend
        on these (a stream behind a narrower embedding).
        """

        def of_all_layers(block: Block) -> bool:
            return all(self.signature.spaces[root].layer is None for root in block.roots)

        shared = [block for block in self.component.blocks if of_all_layers(block) and block.member is None]
        waiting = {block.root for block in shared}
        moving = set(self.groups)
        progress = True
        while progress:
            progress = False
            for block in shared:
                own = set(block.roots)
                roles = [role for role in self.touching[block.root] if not self._others(role, own) & moving]
                if block.root in waiting and roles:
                    self._apply(self._solve([block], roles))
                    waiting.discard(block.root)
                    moving -= own
                    progress = True

    def _others(self, role: str, own: set[str]) -> set[str]:
        """Return the roots of a matrix's other axes; all roots for a vector, which contains too little to start
        from, and where one of its own is on both axes."""
        entry = self.signature.tensors[role]
        roots = {self.signature.root[leaf.space] for leaf in self.signature.leaves(entry)}
        return roots - own if len(entry.axes) > 1 and not twice(self.signature, role, [*own]) else set(self.groups)

    def _solve(self, wave: Sequence[Block], roles: Sequence[str] | None = None) -> list[dict[str, Element]]:
        """Return the optima of blocks that share no tensor, given all others."""

        def best(block: Block) -> dict[str, Element]:
            if roles is None and not self.twice.isdisjoint(block.roots):
                return self._lowest(block)
            return self._best(block, roles)[0]

        return [*(in_order(best, wave, self.run.workers) if len(wave) > 1 else map(best, wave))]

    def _lowest(self, block: Block) -> dict[str, Element]:
        """Return elements of spaces that a tensor has on two axes, W -> Q W Q'. The best for the first-order change may
        raise the distance. So they are compared with those that are best for the other tensors, and with none."""
        touching = list(dict.fromkeys(role for root in block.roots for role in self.touching[root]))
        once = [role for role in touching if not twice(self.signature, role, block.roots)]
        tried = [{}, *(self._best(block, roles)[0] for roles in (None, once) if roles is None or roles)]
        moves = [Alignment(found, self.batch) for found in tried]

        def distances(role: str) -> list[float]:  # a tensor at a time, since a stream is in all of them
            _, anchor, source, weight = self._pair(role)
            return [self._distance((role, anchor, move.apply(self.signature, role, source), weight)) for move in moves]

        totals = [sum(each) for each in zip(*map(distances, touching), strict=True)]
        return tried[totals.index(min(totals))]

    def _apply(self, wave: Iterable[Mapping[str, Element]]) -> None:
        """Compose the alignment so far with the elements found for every block."""
        for found in wave:
            # Products of maps that are not isometries drift from those of their inverses: use float64.
            exact = {r: g.project(e) if (g := self.groups[r]).uses_gram else e for r, e in found.items()}
            self.total = Alignment(exact, self.batch).after(self.total)
        self.seen = None

    def _best(self, block: Block, roles: Sequence[str] | None = None) -> tuple[dict[str, Element], float]:
        """Return the optimum of one block given all others, and by how much it lowers the objective."""
        if not block.inner:
            return self._best_alone(
                block.root, self.touching[block.root] if roles is None else roles, roles is not None
            )
        pairs = self._pairs(block)
        if block.member is not None:
            return self._best_grouped(block, block.member, pairs)
        if block.nested:
            chain = block.roots
            return nearest_nested(
                self.signature, chain, self.groups, pairs(self.touching[block.root]), self.run.workers
            )

        if roles is None and (found := self._proved(block, pairs)):
            return found

        def those(root: str) -> list[str]:
            some = [role for role in self.touching[root] if roles is None or role in roles]
            return some or self.touching[root]  # of a space that none of the roles touches

        inner = [
            pairwise_moments(self.signature, block.root, root, pairs(those(root)), self.groups[root].uses_gram)
            for root in block.inner
        ]
        inner = [self._so_far(root, moments) for root, moments in zip(block.inner, inner, strict=True)]
        if roles is not None and self.noise is not None:
            inner = [perturbed(moments, self.noise) for moments in inner]
        rest = outer_moments(self.signature, block.root, block.inner, pairs(those(block.root)))
        del pairs  # of wide neurons they take more memory than all that follows
        wreath = Wreath(*(self.groups[root] for root in block.inner))
        index, elements = wreath.nearest(tuple(inner), rest)
        gain = wreath.gain((index, elements), tuple(inner), rest)
        return {block.root: index, **dict(zip(block.inner, elements, strict=True))}, gain

    def _best_alone(self, root: str, roles: Sequence[str], start: bool) -> tuple[dict[str, Element], float]:
        """Return the same for one space. An isometry shared by all layers is applied to the moments, not to every
        tensor."""
        group, isometry = self.groups[root], self.groups[root].isometry
        space = self.signature.spaces[root]
        shared = space.layer is None
        own = self.total.elements.get(root) if shared and isometry and root not in self.twice else None
        read = partial(self._pair, without=root if own is not None else None)
        if not (shared or start):
            pairs = self._pairs(Block(root)) if len(self.component.blocks) > 1 else partial(map, self._pair)
            if found := self._proved(Block(root), pairs):
                return found
            read = partial(_first, pairs)
        run = partial(in_order, workers=self.run.workers if shared else 1)
        if start and self.number == 1:
            read = partial(self._evened, root, read)
        moments = cross_moments(self.signature, root, roles, group.uses_gram, isometry, read, run)
        if own is not None:
            moments = carried(moments, own)
        if start and self.noise is not None:
            moments = perturbed(moments, self.noise)
        element = group.nearest(self._so_far(root, moments))
        return {root: element}, float((moments.stay() - moments.value(element)).sum())

    def _proved(
        self, block: Block, pairs: Callable[[Iterable[str]], Iterable[Pair]]
    ) -> tuple[dict[str, Element], float] | None:
        """Return the optimum of many neurons, if a few columns prove it."""
        if not provable(self.signature, block, self.groups):
            return None
        inner = {one: self.groups[one] for one in block.inner}
        return proved(self.signature, block.root, inner, lambda: pairs(self.touching[block.root]))

    def _so_far(self, root: str, moments: Moments) -> Moments:
        """Return moments with the element so far, if the group bounds the product of all sweeps."""
        own = self.total.elements.get(root) if self.groups[root].uses_gram else None
        if not isinstance(own, Linear):
            return moments
        of_all_pairs = moments.primal.dim() > own.matrix.dim()
        matrix = own.matrix.unsqueeze(-4) if of_all_pairs else own.matrix
        return replace(moments, so_far=matrix.expand_as(moments.primal))

    def _evened(self, root: str, read: Callable[[str], Pair], role: str) -> Pair:
        """Return a pair with the spectra of both evened out along one space."""
        _, anchor, source, weight = read(role)
        both = anchor.clone(), source.clone()
        for tensor in both:
            for view, _, _ in self.signature.views(role, tensor, root):
                view.copy_(evened(as_matrix(view, 0)).view(view.shape))
        return role, *both, weight

    def _best_grouped(
        self, block: Block, member: str, pairs: Callable[[Iterable[str]], Iterable[Pair]]
    ) -> tuple[dict[str, Element], float]:
        """Return the same for grouped heads."""
        signature, outer = self.signature, block.root
        inner = [root for root in block.inner if root != member]
        groups = [self.groups[root] for root in inner]
        both = [
            grouped_moments(signature, outer, member, root, pairs(self.touching[root]), group.uses_gram)
            for root, group in zip(inner, groups, strict=True)
        ]
        shared, single = zip(*both, strict=True)
        shared = tuple(each and self._so_far(root, each) for root, each in zip(inner, shared, strict=True))
        members = member_gains(signature, member, inner, pairs(self.touching[member]))
        rest = outer_moments(signature, outer, block.inner, pairs(self.touching[outer]))
        (index, order, elements), gain = GroupedWreath(*groups).nearest(shared, single, members, rest)
        return {outer: index, member: order, **dict(zip(inner, elements, strict=True))}, gain


def _first(pairs: Callable[[Iterable[str]], Iterable[Pair]], role: str) -> Pair:
    return next(iter(pairs([role])))
