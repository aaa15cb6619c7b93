# SPDX-License-Identifier: Apache-2.0
"""The tensors of a traced twin as they are stored in a file, each with axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from onebasin.symmetry.inference.atoms import PERMUTE, Axis, data, flat, hold, joined, new
from onebasin.symmetry.inference.rules import moved
from onebasin.symmetry.inference.trace import KEY, Call, Label
from onebasin.symmetry.inference.unification import unify
from onebasin.symmetry.inference.writing.draft import Found
from onebasin.symmetry.tables.signature import MOVES

from .tracing import Traced


def on_disk(found: Traced) -> list[Found]:
    """Return the tensors in a twin's file with their axes."""
    numbered, disk = found.numbered, found.file
    starts = {name: int(tensor.flatten()[0]) for name, tensor in numbered.items() if tensor.numel()}
    ends = {name: start + numbered[name].numel() for name, start in starts.items()}
    owner: dict[str, list[str]] = {}
    for name, ids in disk.items():
        if not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        owner[name] = [one for one in starts if starts[one] <= high and low < ends[one]]
    # The pieces of one parameter, by number: those of experts.
    families: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in owner:
        whole = len(owner[name]) == 1 and disk[name].numel() == numbered[owner[name][0]].numel()
        for match in () if whole else _numbers_in(name):
            families.setdefault((match[0], match[2], "|".join(owner[name])), {})[match[1]] = name
    entries: list[Found] = []
    done: set[str] = set()
    for (before, after, parameter), names in families.items():
        if len(names) < 2 or set(names) != set(range(len(names))) or "|" in parameter or done & set(names.values()):
            continue
        axes = found.axes[parameter]
        if (
            len({disk[name].shape for name in names.values()}) > 1
            or not axes
            or axes[0] is None
            or axes[0].size != len(names)
        ):
            continue
        ordered = [disk[names[i]] for i in range(len(names))]
        stacked = torch.stack(ordered)
        expert, *inner = _axes_of(found, parameter, numbered[parameter], stacked)
        places = [
            d
            for d, axis in enumerate(inner)
            if axis is not None and all(leaf.moves <= PERMUTE | MOVES["factor"] for leaf in axis.leaves)
        ]
        joint = next((d for d in places if any(leaf.moves for leaf in inner[d].leaves)), 0)  # type: ignore[union-attr]
        expert = expert if expert is not None else data(len(names))
        inner[joint] = flat([expert, inner[joint]]) if inner[joint] is not None else expert  # type: ignore[list-item]
        shape = [n * (len(names) if d == joint else 1) for d, n in enumerate(ordered[0].shape)]
        entries.append(Found(f"{before}{{@}}{after}", inner, parameter, tuple(shape), joint=joint))
        done |= set(names.values())
    for name, ids in disk.items():
        if name in done:
            continue
        mine = owner.get(name, [])
        if not mine:  # it is empty
            entries.append(Found(name, [data(n) if n != 1 else None for n in ids.shape], name, tuple(ids.shape)))
            continue
        if len(mine) == 1:
            axes = (
                found.axes[mine[0]]
                if torch.equal(ids, numbered[mine[0]].long())
                else _axes_of(found, mine[0], numbered[mine[0]], ids)
            )
        else:
            axes = _side_by_side(found, {one: numbered[one] for one in mine}, ids)
        entries.append(Found(name, axes, mine[0], tuple(ids.shape), found.tied.get(mine[0], "")))
    for name, home in found.tied.items():
        for a, b in zip(found.axes[name], found.axes.get(home, ()), strict=False):
            if a is not None and b is not None and not a.moves and not b.moves and not a.top.atom.parts:
                unify(a, b, "tied")
    names_of = {one.parameter: one.name for one in entries if not one.tied}
    for one in entries:
        one.tied = names_of.get(one.tied, one.tied)
    return entries


def _numbers_in(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield every number in a name, the last first, with the text before and after it."""
    for match in reversed(list(re.finditer(r"(?<=\.)\d+(?=\.)", name))):
        yield name[: match.start()], int(match[0]), name[match.end() :]


def _axes_of(found: Traced, parameter: str, numbered: Tensor, ids: Tensor) -> list[Axis | None]:
    """Return the axes of a tensor that has entries of a parameter, by the numbers of its entries and of these."""
    source, places = torch.empty(numbered.shape), ids - int(numbered.flatten()[0])
    setattr(source, KEY, Label(list(found.axes[parameter])))
    out = torch.empty(places.shape)
    moved(found.trace, source, out, places, Call("stored", None, (), {}))
    return found.trace.axes(out)


def _side_by_side(found: Traced, owners: Mapping[str, Tensor], ids: Tensor) -> list[Axis | None]:
    """Return the axes of a tensor that consists of several parameters, one after another along a dimension.

    owners: the parameters with the numbers of their entries. ids: those of the tensor.
    """
    starts = {one: int(numbers.flatten()[0]) for one, numbers in owners.items()}
    ends = {one: starts[one] + numbers.numel() for one, numbers in owners.items()}
    for dim in range(ids.dim()):
        lines = ids.movedim(dim, 0).reshape(ids.shape[dim], -1)
        which = [next(one for one in owners if starts[one] <= int(line[0]) < ends[one]) for line in lines]
        if any(
            int(line.min()) < starts[one] or int(line.max()) >= ends[one]
            for line, one in zip(lines, which, strict=True)
        ):
            continue
        cuts = [i for i in range(len(which)) if i == 0 or which[i] != which[i - 1]]
        pieces = []
        for start, end in zip(cuts, [*cuts[1:], len(which)], strict=True):
            part = ids.narrow(dim, start, end - start)
            pieces.append((_axes_of(found, which[start], owners[which[start]], part), end - start))
        axes: list[Axis | None] = []
        for d in range(ids.dim()):
            here = [got[d] for got, _ in pieces]
            if d == dim:
                axes.append(joined([axis or data(length) for axis, (_, length) in zip(here, pieces, strict=True)]))
            else:
                first = next((axis for axis in here if axis is not None), None)
                for axis in here:
                    if axis is not None and first is not None:
                        unify(first, axis, "stored together")
                axes.append(first)
        return axes
    for one in owners:
        hold(found.axes[one], "stored together")
    return [new(n, frozenset()) if n > 1 else None for n in ids.shape]
