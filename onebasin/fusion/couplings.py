# SPDX-License-Identifier: Apache-2.0
"""Transport plans from the neurons of a source to those of an anchor, space by space, from weights or activations.

ground: the ground cost. `wts` compares the weights and biases that touch a space, with the source's other spaces
carried over already. `acts` compares activations on data: the outputs of the layers that write a space, and of the
norms for the residual stream.

residual: how the residual stream is carried over, which every block writes. `one`: by one plan for all of it, from the
tensors that join it to spaces that cannot move (embeddings, heads), or from all its norms; only so do hard couplings
keep the function. `average` and `weighted`: every block's output has its own plan, and what reads a sum takes the mean
of the plans of its two terms, plain or weighted by their norms (Imfeld et al., ICLR 2024, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from onebasin.data.calibration import Data
from onebasin.engine import Means, Tell
from onebasin.models import Model, ModelError
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch
from onebasin.settings import Strength, setting
from onebasin.symmetry import Signature
from onebasin.symmetry.coupling import Blend
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.groups.elements import Acts, Monomial
from onebasin.symmetry.tables.axes import Axis, leaves, nesting
from onebasin.symmetry.tables.signature import MOVES

from .average import average
from .cross_moments import CrossMoments, of_activations, order_of
from .method import Merged, Method, Sources
from .tensors import merged_tensors
from .transport import Transport, Transported, carried, dense, mixed, plan, resized


@dataclass(frozen=True)
class OptimalTransport(Method):
    """The average of the models after transport to the neurons of the anchor."""

    fitted: ClassVar[bool] = True
    any_width: ClassVar[bool] = True

    ground: Literal["wts", "acts"] = setting("wts", "Compare weights (wts), or activations on --data (acts).")
    entropy: Strength = setting(0.0, "Softness of the couplings, such as 0.05; 0 gives hard ones (emd).")
    residual: Literal["one", "average", "weighted"] = setting(
        "one", "Plans of the residual stream: one for all of it, or one after every block (average, weighted)."
    )

    def carry(self, models: Sequence[Model], anchor: int, data: Data, means: Means, tell: Tell | None) -> list[Model]:
        """Return every model, carried over to the shapes and neurons of `models[anchor]`, which stays as it is."""
        fixed = models[anchor]
        batches = replace(data, models=[fixed]).batches if self.ground == "acts" else []
        return [model if model is fixed else
                Transported(model, transport(model, fixed, self, batches, means, tell), fixed)
                for model in models]  # fmt: skip

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        models = self.carry(sources.models, sources.anchor, data, means, tell)
        return Merged(merged_tensors(replace(sources, models=models), average, means))


@dataclass(frozen=True)
class Unit:
    """Spaces that are solved together: a single one, or heads with the spaces inside them."""

    root: str
    inner: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.root, *self.inner)


def transport(
    source: Model,
    anchor: Model,
    way: OptimalTransport | None = None,
    batches: Sequence[Batch] = (),
    means: Means | None = None,
    tell: Tell | None = None,
) -> Transport:
    """Find the maps that carry `source` over to the neurons of `anchor`, of the same widths or of others.

    batches: inputs, for a ground cost of activations.

    Raises:
        ValueError: `acts` has no data, or spaces that cannot be carried over (classes, heads, vocabulary) differ in
            size.
        ModelError: The models differ in family or number of layers.
    """
    way, means = way or OptimalTransport(), means or Means()
    if way.ground == "acts" and not batches:
        raise ValueError("a ground cost from activations needs calibration data (--data), or take weights (wts)")
    if way.ground == "acts" and any(entry.pieces for entry in anchor.signature.tensors.values()):
        raise ValueError("a ground cost from activations compares what two models do on the same tokens, but experts "
                         "see only those that their own router sends them; compare weights (wts)")  # fmt: skip
    mine, theirs = anchor.signature, source.signature
    if mine.family != theirs.family or mine.layers != theirs.layers:
        raise ModelError(f"'{source.name}' and '{anchor.name}' differ in family or number of layers")
    finder = _Finder(source, anchor, way.entropy, {"dtype": means.dtype, "device": means.device})
    if way.ground == "acts":
        ours, moved = finder.loaded(anchor), finder.loaded(source)
        finder.measured = of_activations(ours, moved, batches, finder.target.sizes, tell)
    if way.residual == "one":
        finder.all_at_once(tell)
    else:
        finder.block_by_block(way.residual == "weighted", tell)
    return Transport(finder.target, finder.maps, finder.own)


def units(signature: Signature) -> list[Unit]:
    """Return the units that can be carried over: streams first, then layer by layer, then task heads."""
    before = outer_spaces(signature)
    permuted = [root for root, kind in signature.kinds.items() if "permute" in MOVES[kind]]

    def order(root: str) -> tuple[int, int]:
        space = signature.spaces[root]
        return {"stream": 0, "head": 2}.get(space.part, 1), -1 if space.layer is None else space.layer

    found = []
    for root in sorted(permuted, key=order):
        if not signature.spaces[root].batch:
            inner = [key for key in permuted if signature.spaces[key].batch == (root,) and key not in before]
            found.append(Unit(root, tuple(inner)))
    return found


def outer_spaces(signature: Signature) -> set[str]:
    """Return the spaces that stand before others of more than one dimension in a flattened axis: heads and groups of
    heads."""
    return {signature.root[name] for entry in signature.tensors.values() for leaf, outer in nesting(entry.axes)
            for name in outer if not leaf.constant and signature.sizes[leaf.space] > 1}  # fmt: skip


class _Finder:
    """maps: space -> plan, for the spaces solved so far. own: role -> its own maps, where the stream has several."""

    def __init__(self, source: Model, anchor: Model, entropy: float, how: dict[str, Any]) -> None:
        self.source, self.anchor, self.entropy, self.how = source, anchor, entropy, how
        self.signature = source.signature
        kept = ("rows", "labels")
        sizes = {key: space.size for key, space in anchor.signature.spaces.items() if space.kind not in kept}
        self.target = resized(self.signature, sizes)
        self.units = units(self.signature)
        self.maps: dict[str, Acts] = {}
        self.own: dict[str, dict[str, Acts]] = {}
        self.measured: dict[tuple[str, tuple[str, ...]], CrossMoments] | None = None
        movable = {root for unit in self.units for root in unit.roots if root != unit.root or self.alone(unit)}
        for key, size in self.signature.sizes.items():
            if size != self.target.sizes[key] and self.signature.root[key] not in movable:
                raise ValueError(f"the space '{key}' has {size} entries in '{source.name}' and "
                                 f"{self.target.sizes[key]} in the anchor, and cannot be carried over")  # fmt: skip
        # What both models hold in comparable shapes.
        there = anchor.signature.tensors
        self.roles = [
            role for role, entry in self.signature.tensors.items()
            if entry.alias is None and role in there and self.target.tensors[role].shape == there[role].shape
        ]  # fmt: skip

    def loaded(self, model: Model) -> LoadedModel:
        """Return a model whose activations are followed, so the class must keep its experts apart."""
        return loaded_model(model, **self.how, experts=False)

    def alone(self, unit: Unit) -> bool:
        """Whether the heads of a unit are single heads, not groups that share their keys."""
        spaces = self.signature.spaces
        groups = (key for key in outer_spaces(self.signature) if unit.root in spaces[key].batch)
        return all(spaces[key].size == 1 for key in groups)

    # --- evidence -----------------------------------------------------------------------------------------------

    def evidence(self, unit: Unit, inner: str | None, roles: Iterable[str], raw: bool = False) -> CrossMoments:
        """Return the cross-moments of the neurons of a space; of a space inside heads, those of all heads in a row.

        raw: keep activations in their own units; otherwise every layer has the same weight.
        """
        total, wanted = CrossMoments(), [role for role in roles if role in self.roles]
        if self.measured is not None:
            asked = (unit.root,) if inner is None else (unit.root, inner)
            for (role, found), one in self.measured.items():
                if found == asked and role in wanted:
                    total.join(one, 1.0 if raw else 1 / max(one.energy, 1e-30))
            return total
        members = self.signature.members
        partly = resized(self.target, {key: self.signature.sizes[key] for root in unit.roots for key in members[root]})
        for role in wanted:
            maps = {root: act for root, act in self.of(role).items() if root not in unit.roots}
            tensor = self.source.read(role, **self.how)
            moved, fixed = carried(self.signature, partly, role, tensor, maps), self.anchor.read(role, **self.how)
            of = inner or unit.root
            pairs = zip(self.target.views(role, fixed, of), partly.views(role, moved, of), strict=True)
            for (a, _, roots), (b, _, _) in pairs:
                if inner is None and any(other in roots for other in unit.inner):
                    continue  # decided by the spaces inside
                depth = 1 if inner is None else 2
                total.add(*(view.flatten(0, depth - 1).flatten(1) if view.dim() > depth else view.reshape(-1, 1)
                            for view in (a, b)))  # fmt: skip
        return total

    def of(self, role: str) -> dict[str, Acts]:
        return {**self.maps, **self.own.get(role, {})}

    def ready(self, unit: Unit) -> list[str]:
        """Return the tensors that touch a unit and whose other spaces have been carried over."""
        waiting = {root for other in self.units if other != unit for root in other.roots}
        found = []
        for role in self.roles:
            roots = self.roots_of(role)
            if roots & set(unit.roots) and not (roots & waiting) - self.of(role).keys():
                found.append(role)
        return found

    # --- plans --------------------------------------------------------------------------------------------------

    def solve(self, unit: Unit) -> None:
        roles = self.ready(unit) if self.measured is None else list(self.roles)
        if self.measured is not None and self.signature.spaces[unit.root].part == "stream":
            roles = [role for role in roles if self.signature.tensors[role].norm is not None] or roles
        if not unit.inner:
            found = self.evidence(unit, None, roles)
            if found.cross is not None:
                self.maps[unit.root] = plan(found.cost, self.entropy)
                return
        else:
            self.solve_heads(unit, roles)
        for root in unit.roots:
            if root not in self.maps and self.signature.sizes[root] != self.target.sizes[root]:
                raise ValueError(f"nothing determines how the space '{root}' is carried over")

    def solve_heads(self, unit: Unit, roles: list[str]) -> None:
        """Assign whole heads, by the costs of the best plans inside every pair. If the models have different numbers of
        heads, one head is shared among several, or several become one."""
        ours, theirs = self.target.sizes[unit.root], self.signature.sizes[unit.root]
        direct = self.evidence(unit, None, roles)
        total = torch.zeros(ours, theirs, dtype=self.how["dtype"]) if direct.cross is None else direct.cost
        costs = {}
        for inner in unit.inner:
            found = self.evidence(unit, inner, roles)
            if found.cross is None:
                continue
            m, n = self.target.sizes[inner], self.signature.sizes[inner]
            cost = costs[inner] = found.cost.view(ours, m, theirs, n).transpose(1, 2)
            total = total.to(cost) + torch.stack([torch.stack([_value(one) for one in row]) for row in cost])
        if ours != theirs:
            heads = self.maps[unit.root] = plan(total)
            self.maps |= {inner: self.within(inner, heads, cost) for inner, cost in costs.items()}
            return
        index = assignment(-total)
        self.maps[unit.root] = Monomial(index)
        for inner, cost in costs.items():
            self.maps[inner] = _stacked([plan(cost[i, j], self.entropy) for i, j in enumerate(index.tolist())])

    def within(self, inner: str, heads: Acts, cost: Tensor) -> Blend:
        """Return the map of a space inside heads whose number changes. cost: (ours, theirs, m, n).

        Values of several heads are added up by their readers, which therefore share the effect of a head. Queries meet
        only the keys of their own head, so both are means over the heads that are joined.
        """
        weights = list(dense(heads, cost))
        if not self.added_up(inner):
            weights[1] = weights[0]
        ours, theirs, m, n = cost.shape
        both = [cost.new_zeros(ours, theirs, m, n) for _ in weights]
        for i, j in weights[0].nonzero().tolist():
            for matrix, weight, one in zip(both, weights, dense(plan(cost[i, j], self.entropy), cost), strict=True):
                matrix[i, j] = weight[i, j] * one
        return Blend(*both)

    def added_up(self, inner: str) -> bool:
        """Whether a tensor reads a space inside heads and writes another space, where heads add up."""

        def reads(axis: Axis) -> bool:
            return any(leaf.dual and self.signature.root.get(leaf.space) == inner for leaf in leaves(axis))

        return any(
            reads(axis) and any(not leaf.dual for other in entry.axes if other is not axis for leaf in leaves(other))
            for entry in self.signature.tensors.values()
            for axis in entry.axes
        )

    def all_at_once(self, tell: Tell | None) -> None:
        for unit in self.units:
            if tell:
                tell(f"transport of {unit.root}")
            self.solve(unit)

    def block_by_block(self, weighted: bool, tell: Tell | None) -> None:
        """Solve along the forward pass: the output of a block gets its own plan, and its readers the mean of the plans
        so far."""
        streams = {unit.root: unit for unit in self.units if self.signature.spaces[unit.root].part == "stream"}
        running: dict[str, Acts] = {}
        sums: dict[str, CrossMoments] = {root: CrossMoments() for root in streams}
        first: list[tuple[str, str]] = []  # writers of a stream before its first reader share one plan

        def start(root: str, readers: Sequence[str] = ()) -> Acts:
            if root not in running:
                if sums[root].cross is None:  # the output of embeddings is not measured; that of their norm is
                    sums[root] = self.evidence(streams[root], None, readers, raw=True)
                running[root] = _stay(self, root) if sums[root].cross is None else plan(sums[root].cost, self.entropy)
                for role, of in first:
                    if of == root:
                        self.own.setdefault(role, {})[root] = running[root]
            return running[root]

        for held in order_of(self.loaded(self.anchor)):
            roles = [role for role in held if role in self.signature.tensors]
            touched = sorted((root, role) for role in roles for root in self.roots_of(role) & streams.keys())
            written = {root for root, role in touched if self.writes(role, root)}
            for root, role in touched:
                if root not in written:
                    self.own.setdefault(role, {})[root] = start(root, roles)
            for unit in self.units:  # the inside of the block: all that it reads of the stream is known by now
                inside = any(self.roots_of(role) & set(unit.roots) for role in roles)
                if inside and unit.root not in streams and written and unit.root not in self.maps:
                    self.solve(unit)
            for root in written:
                mine = [role for of, role in touched if of == root]
                found = self.evidence(streams[root], None, mine, raw=True)
                if root in running and found.cross is not None:
                    new = plan(found.cost, self.entropy)
                    ours, theirs = math.sqrt(found.energy), math.sqrt(sums[root].energy)
                    running[root] = mixed(running[root], new, ours / (ours + theirs) if weighted else 0.5, found.cost)
                    for role in mine:
                        self.own.setdefault(role, {})[root] = new
                elif root not in running:
                    first += [(role, root) for role in mine]
                sums[root].join(found)
            if tell and roles:
                tell(f"transport up to {roles[0]}")
        for root in streams:
            self.maps.setdefault(root, start(root))
        for unit in self.units:
            if unit.root not in self.maps:
                self.solve(unit)

    def roots_of(self, role: str) -> set[str]:
        return {self.signature.root[leaf.space] for leaf in self.signature.leaves(self.signature.tensors[role])}

    def writes(self, role: str, root: str) -> bool:
        entry = self.signature.tensors[role]
        leaves = [leaf for leaf in self.signature.leaves(entry) if self.signature.root[leaf.space] == root]
        return entry.norm is None and len(entry.axes) > 1 and not any(leaf.dual for leaf in leaves)


def _stay(finder: _Finder, root: str) -> Acts:
    size = finder.signature.sizes[root]
    if size != finder.target.sizes[root]:
        raise ValueError(f"nothing determines how the space '{root}' is carried over")
    return Monomial(torch.arange(size))


def _value(cost: Tensor) -> Tensor:
    """Return the cost of the best plan times the number of the anchor's neurons: the remaining sum of squares."""
    best = plan(cost)
    if isinstance(best, Monomial):
        return cost.gather(1, best.index.unsqueeze(1)).sum()
    assert isinstance(best, Coupling)
    return (best.matrix * cost).sum()


def _stacked(plans: Sequence[Acts]) -> Acts:
    """Return one map for every head, stacked."""
    if all(isinstance(one, Monomial) for one in plans):
        return Monomial(torch.stack([one.index for one in plans if isinstance(one, Monomial)]))
    couplings = [one for one in plans if isinstance(one, Coupling)]
    return Coupling(*(torch.stack([one.of(dual) for one in couplings]) for dual in (False, True)))
