# SPDX-License-Identifier: Apache-2.0
"""The audit of a family or a small model: does its table have all continuous symmetries?

Completeness depends only on the architecture, so all parameters are drawn at random, norms have no epsilon, and
everything is in float64.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from onebasin.families import UnknownFamily, named_table, table_for, tables
from onebasin.models import Folder, ModelError
from onebasin.running.classes import neither_folder_nor_type, quietly
from onebasin.running.configuration import default_config
from onebasin.running.inference import of_config
from onebasin.running.shrinking import Scale
from onebasin.running.twins import build, floats_of
from onebasin.settings import Seed, checked
from onebasin.symmetry.audit.null_space import WRONG, Audit
from onebasin.symmetry.audit.null_space import audit as audit_signature
from onebasin.symmetry.tables.table import Table

from .random_points import Function, as_functions, inputs_like, random_point
from .tiny_models import tiny_model

POINTS = 3  # most random points to try until nothing is missing at one

# Of the twin of a type whose table is inferred. There are more tokens than a stream of eight dimensions has squares and
# products, and as many neurons as needed: otherwise some matrix could change the lengths that norms use without an
# effect on any token.
SMALLEST = Scale(
    head=4, heads=1,
    most=dict(width=6, neurons=7, vocabulary=40, positions=6, experts=2, labels=12, grid=2, patches=4, bins=10,
              ratio=1),
)  # fmt: skip
LARGER = replace(SMALLEST, most={**(SMALLEST.most or {}), "grid": 3})  # in a row of two patches, turns may be half ones


def audit(target: str | Path, *, family: str | None = None, seed: int = 0, **settings: Any) -> Audit:
    """Audit a family, a model type, or a model folder, whose weights are replaced by random ones.

    Args:
        target: The family, the model type or the folder.
        family: The name or file of a table to use instead of the model type's own.
        seed: Of all random numbers.
        settings: Values in the configuration of a family's tiny model.

    Raises:
        ValueError: The family is unknown, its configuration refuses the settings, there are settings for a folder, or
            the model has more than `LARGEST` parameters.
    """
    seed = checked(Seed, "seed", seed)
    if Path(target).is_dir():
        if settings:
            raise ValueError(f"'{target}' is a model folder; set '{next(iter(settings))}' in its config.json")
        return audit_checkpoint(Folder(target, family), seed)
    name = str(target)
    kind = tables()[name].types[0] if name in tables() else name
    if kind not in CONFIG_MAPPING:
        raise ValueError(neither_folder_nor_type(name))
    try:
        table_for(kind) if family is None else named_table(family)
    except UnknownFamily:
        if settings:
            raise ValueError(f"the table of '{kind}' is inferred, so its tiny model takes no settings") from None
        return audit_inferred(kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        with quietly():
            tiny_model(kind, **settings).save_pretrained(folder)
        checkpoint = Folder(folder, family)
        checkpoint.name = f"tiny {kind}"  # for errors
        return audit_checkpoint(checkpoint, seed)


def audit_inferred(kind: str, seed: int = 0) -> Audit:
    """Audit the table that is inferred for a model type, on the smallest twin, at up to `POINTS` random points.

    One point at which nothing is missing is enough: a generic point has the least number of flat directions, and the
    table generates the largest number there. More directions are flat if a neuron happens to be dead, or is clipped for
    most inputs, and nearly flat ones leave no gap. Images are larger at the last point.

    Raises:
        ValueError: No exact table is inferred for it, or its smallest twin is too large.
    """
    table = of_config(default_config(kind).to_dict()).table
    cls = type(build(kind)[0])  # also caches how it runs, for the next call
    *first, last = range(seed, seed + POINTS)
    for scale, points in ((SMALLEST, first), (LARGER, [last])):
        try:
            with _twin(kind, cls, table, seed, scale) as (twin, given):
                for point in points:
                    found = _at(point, twin, given)
                    if found.complete:
                        return found
        except ValueError:
            if scale is LARGER:
                raise
    return found


@contextmanager
def _twin(
    kind: str, cls: type[PreTrainedModel], table: Table, seed: int, scale: Scale
) -> Iterator[tuple[Folder, dict[str, Tensor]]]:
    """Write the smallest twin that runs; yield its folder, read by the table, and the inputs on which it ran."""
    try:
        model, given = build(kind, cls, seed, scale)
    except ModelError:
        wider = {name: n for name, n in (scale.most or {}).items() if name != "width"}
        model, given = build(kind, cls, seed, replace(scale, most=wider))
    with tempfile.TemporaryDirectory() as folder:
        with quietly():
            model.save_pretrained(folder)
        twin = Folder(folder)
        twin.name = f"tiny {kind}"
        try:
            twin.read_by(table)
            assert twin.signature
        except ModelError:  # it names layers that the twin does not have
            twin.read_by(of_config(twin.raw_config).table)
        yield twin, given


def _at(point: int, twin: Folder, given: dict[str, Tensor]) -> Audit:
    """Audit a twin at a random point, by a table of its own where the one that it is read by is wrong for it."""
    found = audit_checkpoint(twin, point, given)
    if found.largest_change >= WRONG:  # a size that this configuration tells otherwise
        twin.read_by(of_config(twin.raw_config).table)
        found = audit_checkpoint(twin, point, given)
    return found


def audit_checkpoint(checkpoint: Folder, seed: int = 0, given: Mapping[str, Tensor] | None = None) -> Audit:
    """Audit a model folder's architecture, at a random point. Integers (counters) are not parameters.

    given: inputs on which the model runs, as a pattern for many random ones (default: made for its `forward`).
    """
    generator = torch.Generator().manual_seed(seed)
    signature, tensors = random_point(checkpoint, generator)
    count = sum(tensors[role].numel() for role, entry in signature.tensors.items() if entry.alias is None)
    how = (partial(inputs_like, given), floats_of) if given else ()  # as in the proof of the table
    functions = as_functions(checkpoint, 4 * count, generator, *how)
    counters = {role: torch.zeros(()) for role in checkpoint.signature.tensors.keys() - signature.tensors.keys()}
    return audit_signature(signature, tensors, [partial(_given, one, counters) for one in functions])


def _given(function: Function, counters: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    return function(counters | tensors)
