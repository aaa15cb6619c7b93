# SPDX-License-Identifier: Apache-2.0
"""Cross-moments of the neurons of two models: of their weights or of their activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from onebasin.engine import Tell
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, examples, hooks, linear_layers, run, samples
from onebasin.running.valid_inputs import first_that_runs
from onebasin.symmetry.tables.axes import Axis, Leaf, blocks


@dataclass
class CrossMoments:
    """Sums of products of neurons of the anchor, x (m, features), and of the source, y (n, features)."""

    cross: Tensor | None = None
    ours: Tensor | None = None
    theirs: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        self.join(CrossMoments(x @ y.mT, x.square().sum(-1), y.square().sum(-1)))

    def join(self, other: CrossMoments, scale: float = 1.0) -> None:
        if other.cross is None or other.ours is None or other.theirs is None:
            return
        cross, ours, theirs = scale * other.cross, scale * other.ours, scale * other.theirs
        if self.cross is None or self.ours is None or self.theirs is None:
            self.cross, self.ours, self.theirs = cross, ours, theirs
        else:
            self.cross, self.ours, self.theirs = self.cross + cross, self.ours + ours, self.theirs + theirs

    @property
    def energy(self) -> float:
        return 0.0 if self.ours is None else float(self.ours.sum())

    @property
    def cost(self) -> Tensor:
        """Squared distances, (m, n)."""
        assert self.cross is not None and self.ours is not None and self.theirs is not None
        return self.ours.unsqueeze(1) + self.theirs - 2 * self.cross


def of_activations(
    anchor: LoadedModel,
    source: LoadedModel,
    batches: Sequence[Batch],
    sizes: Mapping[str, int],
    tell: Tell | None = None,
) -> dict[tuple[str, tuple[str, ...]], CrossMoments]:
    """Return the cross-moments of every block of the outputs of linear layers and norms.

    sizes: of the spaces; those of size 1 are left out of the roots.

    Returns:
        (role, roots of the block) -> sums.
    """
    found: dict[tuple[str, tuple[str, ...]], CrossMoments] = {}
    outputs = _outputs(source, examples(batches[0], 0, 2))
    own = anchor.signature.sizes, source.signature.sizes

    def long(leaf: Leaf) -> bool:
        return (int(leaf.space) if leaf.constant else sizes[leaf.space]) != 1

    for number, batch in enumerate(batches, 1):
        if tell:
            tell(f"measuring activations: batch {number} of {len(batches)}")
        seen = [_seen(stock, outputs, batch) for stock in (anchor, source)]
        for role, (_, axis) in outputs.items():
            for x, y in zip(seen[0].get(role, []), seen[1].get(role, []), strict=True):
                ours, theirs = (blocks(t, (Leaf(str(len(t))), axis), s) for t, s in zip((x, y), own, strict=True))
                for (a, leaves), (b, _) in zip(ours, theirs, strict=True):
                    roots = tuple(
                        source.signature.root.get(leaf.space, leaf.space) for leaf in leaves[1:] if long(leaf)
                    )
                    found.setdefault((role, roots), CrossMoments()).add(a.flatten(1).mT, b.flatten(1).mT)
    return found


def _outputs(stock: LoadedModel, example: Batch) -> dict[str, tuple[str, Axis]]:
    """Return role of a weight -> its module, and the axis of the module's output, of linear layers and norms."""
    found: dict[str, tuple[str, Axis]] = {}
    for call in linear_layers(stock, example):
        found[call.weight] = call.module, call.axes(stock)[1]
    for role, entry in stock.signature.tensors.items():
        if entry.norm is not None and not entry.norm.beside and role in stock.owner:
            found[role] = stock.owner[role], entry.axes[-1]
    return found


def _seen(stock: LoadedModel, outputs: dict[str, tuple[str, Axis]], batch: Batch) -> dict[str, list[Tensor]]:
    """Return role -> outputs of its module, (samples, neurons), without padding."""
    found: dict[str, list[Tensor]] = {}
    mask = batch.get("attention_mask")

    def look(role: str) -> Callable[[Tensor, Tensor], None]:
        def record(_: Tensor, y: Tensor) -> None:
            found.setdefault(role, []).append(samples(y.detach(), mask).clone())

        return record

    with hooks(stock, {module: look(role) for role, (module, _) in outputs.items()}):
        run(stock, batch)
    return found


def order_of(stock: LoadedModel) -> list[list[str]]:
    """Return the roles of every module that has any, in the order in which the modules first return."""
    owned: dict[str, list[str]] = {}
    for role, name in stock.owner.items():
        owned.setdefault(name, []).append(role)
    order: dict[str, None] = {}

    def returned(name: str) -> Callable[..., None]:
        return lambda *_: order.setdefault(name)

    handles = [stock.model.get_submodule(name).register_forward_hook(returned(name)) for name in owned]
    try:
        first_that_runs(stock.model, stock.model, 2, 8, 0, partial(run, stock))
    finally:
        for handle in handles:
            handle.remove()
    return [owned[name] for name in order]
