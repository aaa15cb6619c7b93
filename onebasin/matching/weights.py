# SPDX-License-Identifier: Apache-2.0
"""Weight matching: the alignment that brings a source's weights closest to an anchor's, without data.

Spaces that share a block of a tensor are coupled. A space that is not coupled has a closed form, so all of `paper` is
one pass in any order (rotation paper, Algorithm 1 and Eq. 7). Coupled spaces are visited in turn, and each is set to
its exact optimum given the others: block coordinate descent, whose objective never increases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from onebasin.engine import in_order, on_ray
from onebasin.settings import Count, Factor, Few, Seeded, Strength, setting
from onebasin.symmetry import Alignment, Group, Signature

from .components import Component, components_of, present, workers_for
from .coordinate_descent import CoordinateDescent, Read, Run
from .matched import Matched, joined


@dataclass(frozen=True)
class Weights(Seeded):
    """Settings of weight matching."""

    section: ClassVar[str] = "Matching"

    starts: Few = setting(1, "Number of searches if spaces are coupled; the best result is kept.")
    tensor_weights: Mapping[str, Strength] = setting(
        factory=dict, help="NAME=W: tensors whose name contains NAME count W times. Repeatable.", flag="tensor-weight"
    )
    relative: bool = setting(False, "Divide the distance of every tensor by the geometric mean of the two norms.")
    tolerance: Factor = setting(1e-6, "Relative decrease per sweep below which coupled spaces have converged.")
    max_sweeps: Count = setting(100, "Most sweeps over coupled spaces.")

    def refuse_unknown(self, roles: Collection[str]) -> None:
        """Raise ValueError if no role of a model contains a name in `tensor_weights`."""
        for part in self.tensor_weights:
            if not any(part in role for role in roles):
                words = sorted({word for role in roles for word in (role, *role.split("."))})
                near = get_close_matches(part, words, 3, 0.5) or words[:3]
                raise ValueError(f"--tensor-weight {part}: no tensor's name contains it; there are, for example, "
                                 f"{', '.join(near)}")  # fmt: skip

    def weigh(self, role: str, anchor: Tensor, source: Tensor) -> float:
        """Return a tensor's weight in the objective, including that of `relative`."""
        return self.weight(role) / (typical_size(anchor, source) if self.relative else 1.0)

    def weight(self, role: str) -> float:
        """Return a tensor's weight by `tensor_weights`: of the first name that its role contains, else 1."""
        return next((weight for part, weight in self.tensor_weights.items() if part in role), 1.0)


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
        read: Role -> (anchor, source) tensors of equal shape, in the dtype and on the device of the arithmetic; called
            whenever they are used, from several threads. Only the tensors of a few layers (one for every worker) are in
            memory at a time.
        groups: Root space -> the group that acts on it.
        how: The settings (default: those of `Weights()`). Of several starts of coupled spaces, the first is from the
            tensors anchored in fixed spaces, the second from the same tensors with their spectra evened out, the others
            from the first with noise.
        roles: The tensors to compare (default: all but aliases).
        start: An alignment by the same groups, perhaps empty, from which the descent continues; the result includes it.
        run: Workers, progress and the store.

    Returns:
        The alignment, and the distances before and after.
    """
    how, run = how or Weights(), run or Run()
    run = replace(run, workers=workers_for(signature, run.workers))
    counted = [role for role, entry in signature.tensors.items() if entry.alias is None]
    if roles is not None:
        wanted = set(roles)
        counted = [role for role in counted if role in wanted]
    active = present(signature, counted, groups)
    parts = components_of(signature, counted, active)
    found = {part.name: Matched.load(path) for part in parts if run.store and (path := run.store.find(part.name))}
    left = sorted((part for part in parts if part.name not in found), key=partial(_wide, signature))
    here = replace(run, progress=None) if run.ray else run  # which has to be pickled
    solve = partial(_solved, signature, read, active, how, here, start)
    if run.ray:
        solved = on_ray(solve, left, run.ray)
    else:
        beside = [part for part in left if not _wide(signature, part)]
        solved = chain(in_order(solve, beside, run.workers), map(solve, left[len(beside) :]))
    for part, matched in zip(left, solved, strict=True):
        found[part.name] = matched
        if run.store:
            run.store.put(part.name, matched.save)
        if run.progress:
            run.progress(f"{part.name}, {len(found)} of {len(parts)}", matched.objective[-1])
    return joined(found[part.name] for part in parts)


def _wide(signature: Signature, component: Component) -> bool:
    """Whether a component has spaces of all layers. Its sweeps use all cores; the other components run in parallel."""
    return any(signature.spaces[block.root].layer is None for block in component.blocks)


def _solved(
    signature: Signature,
    read: Read,
    groups: Mapping[str, Group],
    how: Weights,
    run: Run,
    start: Alignment | None,
    component: Component,
) -> Matched:
    """Match the spaces of one component, which another process can do, too."""
    run = run if _wide(signature, component) else replace(run, workers=1)
    descent = partial(CoordinateDescent, signature, component, read, groups, how, run)
    best: CoordinateDescent | None = None
    coupled = len(component.blocks) > 1
    for number in range(how.starts if coupled and start is None else 1):
        tried = descent(number, start)
        tried.descend()
        if best is None or tried.objective[-1] < best.objective[-1]:
            best = tried
    assert best is not None
    if coupled and start is None and best.objective[-1] > sum(best.before.values()):
        # The start has moved the source away for good (the models were near already): descend from the source.
        best = descent(0, Alignment())
        best.descend()
    return best.finish()


def typical_size(anchor: Tensor, source: Tensor) -> float:
    """Return the geometric mean of both norms, or 1 if it is 0."""
    return math.prod(float(torch.linalg.vector_norm(tensor)) for tensor in (anchor, source)) ** 0.5 or 1.0
