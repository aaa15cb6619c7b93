# SPDX-License-Identifier: Apache-2.0
"""Weight matching of two opened models in units of work, which run in threads or on a cluster and are kept when
finished.

A unit is the spaces of one layer that no tensor joins to those of another, or all remaining spaces. Its result is
small: a few maps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from onebasin.engine import Store, in_order, on_ray
from onebasin.matching import Matched, Run, match_weights
from onebasin.matching.components import components_of, present
from onebasin.matching.weights import joined
from onebasin.models import Model, read_pair
from onebasin.symmetry import Group, Signature, acting_groups

from .options import Options, Tell


@dataclass(frozen=True)
class Unit:
    """roots: the spaces to solve. wide: whether one of them is shared by all layers, so that all workers should work on
    it."""

    name: str
    roots: tuple[str, ...]
    wide: bool


def units(signature: Signature, roles: Sequence[str], groups: Mapping[str, Group]) -> list[Unit]:
    """Return the units of a model: one for every layer, and one for every set of spaces coupled across layers."""
    layers: dict[int, list[str]] = {}
    found: list[Unit] = []
    for component in components_of(signature, roles, present(signature, roles, groups)):
        roots = [root for one in component.blocks for root in one.roots]
        numbers = {signature.spaces[root].layer for root in roots}
        if len(numbers) == 1 and (number := numbers.pop()) is not None:
            layers.setdefault(number, []).extend(roots)
        else:
            found.append(Unit(", ".join(sorted(roots)[:1]), tuple(roots), True))
    return [Unit(f"layer {number}", tuple(roots), False) for number, roots in sorted(layers.items())] + found


def align_weights(source: Model, anchor: Model, roles: Sequence[str], opt: Options, tell: Tell | None) -> Matched:
    """Match the weights of `source` to those of `anchor`, over the tensors `roles`."""
    pieces = units(source.signature, roles, groups_of(source, opt))
    store = None if opt.units is None else Store(Path(opt.units), inputs(source, anchor, roles, opt))
    paths = {piece: store.find(piece.name) if store else None for piece in pieces}
    found = {piece: Matched.load(path) for piece, path in paths.items() if path is not None}
    run = partial(_unit, source, anchor, tuple(roles), opt, store, None if opt.ray else tell)
    for piece, matched in _run(run, [piece for piece in pieces if piece not in found], opt):
        found[piece] = matched
        if store:
            store.put(piece.name, matched.save)
        if tell:
            tell(f"matching {source.name}: {piece.name} of {len(pieces)} units")
    return joined(found[piece] for piece in pieces)


def _run(run: Callable[[Unit], Matched], pieces: Sequence[Unit], opt: Options) -> Iterator[tuple[Unit, Matched]]:
    if opt.ray:
        yield from zip(pieces, on_ray(run, pieces, opt.ray), strict=True)
        return
    beside = [piece for piece in pieces if not piece.wide]
    yield from zip(beside, in_order(run, beside, opt.workers), strict=True)
    yield from ((piece, run(piece)) for piece in pieces if piece.wide)


def _unit(
    source: Model,
    anchor: Model,
    roles: Sequence[str],
    opt: Options,
    store: Store | None,
    tell: Tell | None,
    piece: Unit,
) -> Matched:
    """Solve one unit of work. Another process can do so: models are opened where they are read."""
    groups = groups_of(source, opt)
    return match_weights(
        source.signature,
        lambda role: read_pair(anchor, source, role, opt.dtype, opt.device),
        {root: groups[root] for root in piece.roots},
        opt,
        roles=roles,
        run=Run(opt.workers if piece.wide else 1, tell and partial(_progress, tell, source.name), store),
    )


def _progress(tell: Tell, name: str, what: str, objective: float) -> None:
    tell(f"matching {name}: {what}, distance {objective**0.5:.6g}")


def groups_of(model: Model, opt: Options) -> dict[str, Group]:
    return acting_groups(model.signature, opt.symmetry, rescale=opt.rescale, parts=opt.parts, layers=opt.layers)


def inputs(source: Model, anchor: Model, roles: Sequence[str], opt: Options) -> str:
    """Return, as text, all that a match depends on: the present files of both models, the tensors and the options."""
    files = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for model in (source, anchor)
        for path in sorted({model.origin.folder / "config.json", *model.origin.files.values()})
    ]
    settings = {key: str(value) for key, value in opt.to_dict().items()}
    return json.dumps([torch.__version__, files, list(roles), settings])
