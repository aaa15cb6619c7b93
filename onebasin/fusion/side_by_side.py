# SPDX-License-Identifier: Apache-2.0
"""Second moments of the inputs of several models' layers, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call, examples, hooks, run, samples
from onebasin.symmetry import Signature
from onebasin.symmetry.tables.axes import Axis, Leaf, blocks, size, space_leaves
from onebasin.symmetry.tables.signature import MOVES

from .ridge import gram

Place = tuple[tuple[str, ...], Tensor]  # roots of the spaces of a block of an axis, and where it is in the axis


@dataclass
class SpaceInputs:
    """The inputs of the layers that read a space.

    roots: of their dimensions: of the space, and of those inside it. moments: of the models' inputs side by side, in
    float64 on the CPU, (m n, m n), one for each input. calls: the layers with that input, and where the space is in it.
    """

    roots: tuple[str, ...]
    moments: list[Tensor] = field(default_factory=list)
    calls: list[list[tuple[Call, Tensor]]] = field(default_factory=list)


def kinds_of_spaces(signature: Signature) -> tuple[set[str], set[str]]:
    """Return the roots of streams, which rotate, and of neurons and heads, which are permuted."""
    inner = [space for space in signature.spaces.values() if space.size > 1]  # a factor per neuron has the size 1
    outer = {key for space in inner for key in space.batch}
    streams, units = set[str](), set[str]()
    for root, kind in signature.kinds.items():
        space, moves = signature.spaces[root], MOVES[kind]
        if space.batch or space.output or "permute" not in moves:
            continue
        if moves & {"rotate", "ones"} and root not in outer:
            streams.add(root)
        elif space.part == ("attention" if root in outer else "ffn"):
            units.add(root)
    return streams, units


def axis_roots(signature: Signature, axis: Axis) -> list[Place]:
    """Return the blocks of an axis, with their places."""
    index = torch.arange(size(axis, signature.sizes)).unsqueeze(0)
    return [
        (tuple(signature.root[leaf.space] for leaf in space_leaves(leaves)), piece.flatten())
        for piece, leaves in blocks(index, (Leaf("1"), axis), signature.sizes)
    ]


def consists_of(spaces: set[str], axis: Axis, signature: Signature) -> bool:
    """Whether every block of an axis is of one of these spaces, perhaps with others inside."""
    return all(spaces.intersection(roots) for roots, _ in axis_roots(signature, axis))


def measured(
    models: Sequence[LoadedModel], calls: Sequence[Call], batches: Sequence[Batch], streams: set[str], units: set[str]
) -> dict[str, SpaceInputs]:
    """Return root -> what is read of a space: of streams as it is, of neurons and heads about its mean.

    Args:
        models: In memory, of one signature.
        calls: Of their linear layers.
        batches: Inputs; padding is left out where there is an attention_mask.
        streams: Spaces that are read alone.
        units: Spaces that may have others inside them.
    """
    signature, layers = models[0].signature, {call.module: call for call in calls}
    places: dict[str, list[Place]] = {}
    for name, call in layers.items():
        found = axis_roots(signature, call.axes(models[0])[0])
        kept = [
            one for one in found if one[0][:1] and (one[0][0] in units or (one[0][0] in streams and len(one[0]) == 1))
        ]
        if kept:
            places[name] = kept
    first = _first_with_input(models[0], batches[0], places)
    sums: dict[tuple[str, int], Tensor] = {}  # X^T X, with one more column of ones
    for batch in batches:
        seen = [_inputs(model, batch, dict.fromkeys(first.values())) for model in models]
        for name, ours in seen[0].items():
            for values in zip(ours, *(other[name] for other in seen[1:]), strict=True):
                for number, (_, at) in enumerate(places[name]):
                    x = torch.cat([value[:, at] for value in values], 1)
                    sums[name, number] = gram(x, constant=True).double().add_(sums.get((name, number), 0.0))
    sites: dict[str, SpaceInputs] = {}
    for (name, number), found_sum in sums.items():
        roots, sum_of = places[name][number][0], found_sum.cpu()
        moment, mean = sum_of[:-1, :-1] / sum_of[-1, -1], sum_of[-1, :-1] / sum_of[-1, -1]
        if roots[0] in units:
            moment -= torch.outer(mean, mean)
        site = sites.setdefault(roots[0], SpaceInputs(roots))
        site.moments.append(moment)
        site.calls.append([(layers[one], places[one][number][1]) for one in places if first.get(one) == name])
    return sites


def _inputs(model: LoadedModel, batch: Batch, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """Return layer -> its input in every call, (samples, n)."""
    found: dict[str, list[Tensor]] = {}
    mask = batch.get("attention_mask")

    def look(name: str) -> Callable[[Tensor, Tensor], None]:
        return lambda x, _: found.setdefault(name, []).append(samples(x, mask))

    with hooks(model, {name: look(name) for name in names}):
        run(model, batch)
    return found


def _first_with_input(model: LoadedModel, batch: Batch, places: Mapping[str, Sequence[Place]]) -> dict[str, str]:
    """Return layer -> the first layer with the same input and the same spaces in it: queries, keys and values have
    one."""
    seen: dict[str, Tensor] = {}
    first: dict[str, str] = {}

    def look(name: str) -> Callable[[Tensor, Tensor], None]:
        def record(x: Tensor, _: Tensor) -> None:
            spaces = [roots for roots, _ in places[name]]
            like = (one for one, other in seen.items() if other is x and [roots for roots, _ in places[one]] == spaces)
            first.setdefault(name, next(like, name))
            seen.setdefault(name, x)

        return record

    with hooks(model, {name: look(name) for name in places}):
        run(model, examples(batch, 0, 1))
    return first
