# SPDX-License-Identifier: Apache-2.0
"""Weight matching: the alignment that brings a source's weights closest to an anchor's, without data.

Spaces that share a block of some tensor are coupled. A space coupled to no other has a closed form, so all of
`paper` is one pass in any order (rotation paper, Algorithm 1 and Eq. 7). Coupled spaces are visited in turn, each
set to its exact optimum given the others: block coordinate descent, whose objective never increases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from onebasin.engine import Store, in_order, in_parallel
from onebasin.models.distance import squared_distance
from onebasin.settings import Count, Factor, Few, Seeded, Strength, setting
from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.groups import GroupedWreath, Wreath
from onebasin.symmetry.groups.elements import Element, Linear

from .components import Block, Component, components_of, present
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
)
from .nested import nearest_nested
from .order_proof import provable, proved

Read = Callable[[str], tuple[Tensor, Tensor]]  # role -> (anchor, source)
NEAR = 30.0  # times the tolerance: a sweep that gained no more is likely to be the last but one


@dataclass
class Matched:
    """The result of matching.

    alignment: one element per active space. before: the weighted squared distance before any move, over every tensor
    that an active space touches. objective: the same where the descent starts (coupled spaces are first placed from
    the tensors anchored in fixed spaces), then after every sweep; it never increases. apart: `before`, by role.
    """

    alignment: Alignment
    before: float
    objective: list[float] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        notes = {"before": self.before, "objective": self.objective, "apart": self.apart}
        self.alignment.save(path, {"matched": json.dumps(notes)})

    @classmethod
    def load(cls, path: Path) -> Matched:
        """Read what `save` wrote. Raises ValueError, naming the file, where it is something else."""
        alignment = Alignment.load(path)
        with safe_open(str(path), "pt") as file:
            return cls(alignment, **json.loads(file.metadata()["matched"]))


@dataclass(frozen=True)
class Weights(Seeded):
    """How weights are matched."""

    section: ClassVar[str] = "Matching"

    starts: Few = setting(1, "Tries of the search where spaces are coupled; the closest is kept.")
    tensor_weights: Mapping[str, Strength] = setting(
        factory=dict, help="NAME=W: tensors whose name contains NAME count W times. Repeatable.", flag="tensor-weight"
    )
    relative: bool = setting(False, "Divide every tensor's distance by the root of both norms' product.")
    tolerance: Factor = setting(1e-6, "Relative decrease per sweep below which coupled spaces have converged.")
    max_sweeps: Count = setting(100, "Most sweeps over coupled spaces.")

    def refuse_unknown(self, roles: Collection[str]) -> None:
        """Raise ValueError where no role of a model contains a name that `tensor_weights` gives a weight."""
        for part in self.tensor_weights:
            if not any(part in role for role in roles):
                words = sorted({word for role in roles for word in (role, *role.split("."))})
                near = get_close_matches(part, words, 3, 0.5) or words[:3]
                raise ValueError(f"--tensor-weight {part}: no tensor's name contains it; there are, for example, "
                                 f"{', '.join(near)}")  # fmt: skip

    def weigh(self, role: str, anchor: Tensor, source: Tensor) -> float:
        """Return a tensor's weight in the objective, of either kind."""
        return self.weight(role) / (typical_size(anchor, source) if self.relative else 1.0)

    def weight(self, role: str) -> float:
        """Return a tensor's weight in the objective: that of the first name part that its role contains, else 1."""
        return next((weight for part, weight in self.tensor_weights.items() if part in role), 1.0)


@dataclass(frozen=True)
class Run:
    """With what weight matching runs, which changes no alignment.

    workers: how many independent pieces run at once (default: one per core). progress: called with a text and the
    objective after every step. store: where coupled spaces are kept after every sweep, and looked for at the start.
    measure: False spares closed forms the distance before any move; the objective then starts at 0.
    """

    workers: int | None = None
    progress: Callable[[str, float], None] | None = None
    store: Store | None = None
    measure: bool = True


def match_weights(
    signature: Signature,
    read: Read,
    groups: Mapping[str, Group],
    how: Weights | None = None,
    *,
    roles: Iterable[str] | None = None,
    start: Alignment | None = None,
    run: Run | None = None,
) -> Matched:
    """Match a source to an anchor over the spaces in `groups`.

    Args:
        signature: Of the source.
        read: Role -> (anchor, source) tensors of equal shape, in the dtype and on the device of the mathematics; called
            whenever they are looked at, from several threads. Only the tensors of a few layers (one for every worker)
            are held at a time.
        groups: Root space -> what may act.
        how: The settings (default: all as usual). Of several starts of coupled spaces, the first is from the tensors
            anchored in fixed spaces, the second from the same tensors with their spectra evened out, the others from
            the first with noise.
        roles: The tensors that count (default: all but aliases).
        start: An alignment by the same groups that the descent goes on from, perhaps an empty one; the result includes
            it.
        run: Workers and what they tell.
    """
    how, run = how or Weights(), run or Run()
    counted = [role for role, entry in signature.tensors.items() if entry.alias is None]
    if roles is not None:
        wanted = set(roles)
        counted = [role for role in counted if role in wanted]
    active = present(signature, counted, groups)

    def solve(component: Component) -> Matched:
        descent = partial(_Descent, signature, component, read, active, how, run)
        best: _Descent | None = None
        coupled = len(component.blocks) > 1
        for number in range(how.starts if coupled and start is None else 1):
            tried = descent(number, start)
            tried.descend()
            if best is None or tried.objective[-1] < best.objective[-1]:
                best = tried
        assert best is not None
        if coupled and start is None and best.objective[-1] > sum(best.before.values()):
            # The start led away for good (models that were near already): descend from where the source stands.
            best = descent(0, Alignment())
            best.descend()
        return best.finish()

    components = components_of(signature, counted, active)
    # Components run side by side; one with spaces of all layers uses the cores inside its sweeps instead.
    inward = [any(signature.spaces[block.root].layer is None for block in component.blocks) for component in components]
    alone = [component for component, inside in zip(components, inward, strict=True) if not inside]
    beside = iter(in_parallel(solve, alone, run.workers))
    return joined(solve(c) if inside else next(beside) for c, inside in zip(components, inward, strict=True))


def joined(found: Iterable[Matched]) -> Matched:
    """Join the results for sets of spaces that were matched apart."""
    found = list(found)
    elements = {root: element for one in found for root, element in one.alignment.elements.items()}
    batch = {root: over for one in found for root, over in one.alignment.batch.items()}
    apart = {role: distance for one in found for role, distance in one.apart.items()}
    before = sum(apart.values())
    # A fused tensor may belong to several of them through disjoint blocks, so gains add where distances do not.
    length = max((len(one.objective) for one in found), default=1)
    objective = [
        before - sum(one.before - one.objective[min(i, len(one.objective) - 1)] for one in found) for i in range(length)
    ]
    return Matched(Alignment(elements, batch), before, objective, apart)


@dataclass
class _Descent:
    """Block coordinate descent on one component, from a start of some number or from an alignment.

    Tensors are read anew at every visit and rewritten by what was found so far, so each step is an increment.
    """

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
        self.weight = {role: self.how.weight(role) for role in component.roles}
        for role in component.roles if self.how.relative else ():
            self.weight[role] /= typical_size(*self.read(role))
        self.batch = {root: signature.spaces[root].batch for block in component.blocks for root in block.roots}
        given = self.start.elements if self.start else {}
        self.total = Alignment({root: given[root] for root in self.batch if root in given}, self.batch)
        self.touching = {
            root: [role for role in component.roles if role in set(signature.touching[root])] for root in self.batch
        }
        self.before: dict[str, float] = {}
        self.objective: list[float] = []
        self.seen: dict[str, float] = {}  # distances of tensors that were read since the last change, by role

    @property
    def kept(self) -> str:
        """The name under which its state is kept."""
        return f"{self.component.blocks[0].root}, start {self.number}, warm {self.start is not None}"

    def descend(self) -> None:
        """Find the optimum of a single block, or sweep over coupled ones."""
        blocks, measure, store = self.component.blocks, self.run.measure, self.run.store
        closed = len(blocks) == 1
        if store and not closed and (path := store.find(self.kept)):
            found = Matched.load(path)
            self.total, self.before, self.objective = found.alignment, found.apart, found.objective
            return self._sweep()
        self.before = self._distances() if measure or not closed else {}
        self.objective = [sum(self.before.values())]
        if closed:  # what is gained follows from the moments
            elements, gain = self._best(blocks[0])
            self.total = Alignment(elements, self.batch).after(self.total)
            self.objective.append(max(self.objective[0] - gain, 0.0) if measure else -gain)
            if self.run.progress:
                self.run.progress(blocks[0].root, self.objective[-1])
            return None
        if self.start is None:
            self._start()
            self.objective = []
        return self._sweep()

    def _sweep(self) -> None:
        """Sweep until the objective stays; every state is kept.

        What a sweep has led to is measured on the tensors that the next one reads and rewrites first, unless it is
        likely to be the last.
        """
        first, *rest = self._waves()
        done = max(len(self.objective) - 1, 0)
        while True:
            known = len(self.objective) > done
            ahead = None if known or self._near(done, NEAR) else self._solve(first)
            if not known:
                self._measure()
            if self._near(done):
                return
            self._apply(self._solve(first) if ahead is None else ahead)
            for wave in rest:
                self._apply(self._solve(wave))
            done += 1

    def _near(self, done: int, times: float = 1.0) -> bool:
        """Whether no more sweeps are allowed, or the last decrease that is known was within `times` the tolerance."""
        if done >= self.how.max_sweeps or len(self.objective) < 2:
            return done >= self.how.max_sweeps
        before, now = self.objective[-2:]
        return before - now <= times * self.how.tolerance * before

    def _measure(self) -> None:
        """Note the objective of the state at hand, and keep the state after a sweep."""
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
        """Blocks in order, those that follow one another and share no tensor together: layers, given the stream."""
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
        """Weighted squared distances by role; tensors that were read since the last change are not read again."""

        def distance(role: str) -> float:
            return self.seen[role] if role in self.seen else self._distance(self._pair(role))

        roles = self.component.roles
        return dict(zip(roles, in_order(distance, roles, self.run.workers), strict=True))

    def _distance(self, pair: Pair) -> float:
        _, anchor, source, weight = pair
        return weight * squared_distance(anchor, source)

    def _pair(self, role: str, without: str | None = None) -> Pair:
        """The tensors of a role, the source's rewritten by what was found so far, except on the space `without`."""
        anchor, source = self.read(role)
        found = {root: element for root, element in self.total.elements.items() if root != without}
        return role, anchor, Alignment(found, self.batch).apply(self.signature, role, source), self.weight[role]

    def _pairs(self, block: Block) -> Callable[[Iterable[str]], Iterable[Pair]]:
        """Pairs by role: those of one layer are held while it is solved, those of all layers are read when met."""
        if self.signature.spaces[block.root].layer is None:
            return partial(map, self._pair)
        mine = dict.fromkeys(role for root in block.roots for role in self.touching[root])
        held = {role: self._pair(role) for role in mine}
        if len(self.component.blocks) > 1:
            self.seen.update({role: self._distance(pair) for role, pair in held.items()})
        return partial(map, held.__getitem__)

    def _start(self) -> None:
        """Place the spaces shared by all layers one after another, each from the tensors whose other axes stand.

        First those with an axis in a fixed space (token, position, patch, class tables), then what hangs on them (a
        stream behind a narrower embedding).
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
        """The roots of a matrix's other axes; a vector has none, and says too little to start from."""
        entry = self.signature.tensors[role]
        roots = {self.signature.root[leaf.space] for leaf in self.signature.leaves(entry)}
        return roots - own if len(entry.axes) > 1 else set(self.groups)

    def _solve(self, wave: Sequence[Block], roles: Sequence[str] | None = None) -> list[dict[str, Element]]:
        """Find the optima of blocks that share no tensor, given all others."""

        def best(block: Block) -> dict[str, Element]:
            return self._best(block, roles)[0]

        return in_parallel(best, wave, self.run.workers) if len(wave) > 1 else [*map(best, wave)]

    def _apply(self, wave: Iterable[Mapping[str, Element]]) -> None:
        """Let what was found for every block act after all that was found before."""
        for found in wave:
            # Products of maps that are not isometries grow apart from those of their inverses: kept in float64.
            exact = {r: g.project(e) if (g := self.groups[r]).uses_gram else e for r, e in found.items()}
            self.total = Alignment(exact, self.batch).after(self.total)
        self.seen.clear()

    def _best(self, block: Block, roles: Sequence[str] | None = None) -> tuple[dict[str, Element], float]:
        """The optimum of one block given all others, and by how much it lowers the objective."""
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
            return [role for role in self.touching[root] if roles is None or role in roles]

        inner = [
            pairwise_moments(self.signature, block.root, root, pairs(those(root)), self.groups[root].uses_gram)
            for root in block.inner
        ]
        inner = [self._so_far(root, moments) for root, moments in zip(block.inner, inner, strict=True)]
        if roles is not None and self.noise is not None:
            inner = [_perturb(moments, self.noise) for moments in inner]
        rest = outer_moments(self.signature, block.root, block.inner, pairs(those(block.root)))
        del pairs  # of wide neurons they take more memory than all that follows
        wreath = Wreath(*(self.groups[root] for root in block.inner))
        index, elements = wreath.nearest(tuple(inner), rest)
        gain = wreath.gain((index, elements), tuple(inner), rest)
        return {block.root: index, **dict(zip(block.inner, elements, strict=True))}, gain

    def _best_alone(self, root: str, roles: Sequence[str], start: bool) -> tuple[dict[str, Element], float]:
        """The same for one space. An isometry of all layers acts on the moments rather than on every tensor."""
        group, isometry = self.groups[root], self.groups[root].isometry
        space = self.signature.spaces[root]
        shared = space.layer is None
        own = self.total.elements.get(root) if shared and isometry else None
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
            moments = _perturb(moments, self.noise)
        element = group.nearest(self._so_far(root, moments))
        return {root: element}, float((moments.stay() - moments.value(element)).sum())

    def _proved(
        self, block: Block, pairs: Callable[[Iterable[str]], Iterable[Pair]]
    ) -> tuple[dict[str, Element], float] | None:
        """The optimum of many neurons, where a few columns prove it."""
        if not provable(self.signature, block, self.groups):
            return None
        inner = {one: self.groups[one] for one in block.inner}
        return proved(self.signature, block.root, inner, lambda: pairs(self.touching[block.root]))

    def _so_far(self, root: str, moments: Moments) -> Moments:
        """Moments that know what acts on the source already, where the group bounds the product of all sweeps."""
        own = self.total.elements.get(root) if self.groups[root].uses_gram else None
        if not isinstance(own, Linear):
            return moments
        of_all_pairs = moments.primal.dim() > own.matrix.dim()
        matrix = own.matrix.unsqueeze(-4) if of_all_pairs else own.matrix
        return replace(moments, so_far=matrix.expand_as(moments.primal))

    def _evened(self, root: str, read: Callable[[str], Pair], role: str) -> Pair:
        """A pair with the spectra of both evened out along one space."""
        _, anchor, source, weight = read(role)
        both = anchor.clone(), source.clone()
        for tensor in both:
            for view, _, _ in self.signature.views(role, tensor, root):
                view.copy_(evened(as_matrix(view, 0)).view(view.shape))
        return role, *both, weight

    def _best_grouped(
        self, block: Block, member: str, pairs: Callable[[Iterable[str]], Iterable[Pair]]
    ) -> tuple[dict[str, Element], float]:
        """The same for grouped heads."""
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


def typical_size(anchor: Tensor, source: Tensor) -> float:
    """The root of the product of both norms, and 1 where that is 0."""
    return math.prod(float(torch.linalg.vector_norm(tensor)) for tensor in (anchor, source)) ** 0.5 or 1.0


def _perturb(moments: Moments, generator: torch.Generator) -> Moments:
    """Noise of a tenth of the matrix's own size, for a different start."""
    size = moments.primal.square().mean().sqrt()
    noise = torch.randn(moments.primal.shape, generator=generator).to(moments.primal)
    return replace(moments, primal=moments.primal + 0.1 * size * noise)
