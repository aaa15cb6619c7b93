# SPDX-License-Identifier: Apache-2.0
"""Many models at once: every model gets one alignment into a shared frame, so any cycle composes to the identity.

With T_i the i-th aligned model the objective is the scatter about the mean,

    J = sum_i |T_i - mean|^2 = (1 / m) sum_{i<j} |T_i - T_j|^2.

Given all others, the best T_i is the one closest to the mean of the *others*: sum_{j != i} |T_i - T_j|^2 equals
(m - 1) |T_i - mean_{j != i}|^2 plus a constant. Matching each model in turn to the mean of the others is therefore
block coordinate descent on J itself, and J never increases. (Matching to the mean of *all*, the model included, is
not: each model then pulls towards where it already stands.) The descent starts from the best star, so its result is
never worse than matching all models to one of them. The idea of a universe is that of Crisostomi et al., "C2M3:
Cycle-Consistent Multi-Model Merging", NeurIPS 2024, for permutations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Signature

from .weights import match_weights

Tensors = Mapping[str, Tensor]


@dataclass
class Universe:
    """alignments: one per model, into the frame of `centre`, whose own is the identity. objective: J of the best star,
    then after every round. stars: J of the star about each model that was tried.
    """

    alignments: list[Alignment]
    centre: int
    objective: list[float]
    stars: dict[int, float]


def match_universe(
    signatures: Sequence[Signature],
    models: Sequence[Tensors],
    groups: Sequence[Mapping[str, Group]],
    *,
    centre: int | None = None,
    tolerance: float = 1e-5,
    max_rounds: int = 20,
    progress: Callable[[str, float], None] | None = None,
    **how: Any,
) -> Universe:
    """Align m models to one another.

    models: per model, role -> tensor, over the same roles with equal shapes. signatures, groups: per model.
    centre: the model that stays as it is (default: the centre of the best star). how: passed on to `match_weights`.
    """
    stars: dict[int, tuple[float, list[Alignment], list[Tensors]]] = {}
    for middle in range(len(models)) if centre is None else [centre]:
        alignments, moved = [], []
        for i, (signature, tensors) in enumerate(zip(signatures, models, strict=True)):
            alignment = Alignment()
            if i != middle:
                alignment = _match(signature, models[middle], tensors, groups[i], progress, how)
            alignments.append(alignment)
            moved.append(_apply(signature, alignment, tensors))
        stars[middle] = (scatter(moved), alignments, moved)
    centre = min(stars, key=lambda middle: stars[middle][0])
    value, alignments, current = stars[centre]
    objective = [value]
    for round_number in range(max_rounds if len(models) > 2 else 0):
        for i, signature in enumerate(signatures):
            if i == centre:  # it defines the frame: only relative positions matter
                continue
            others = [current[j] for j in range(len(models)) if j != i]
            target = {role: torch.stack([tensors[role] for tensors in others]).mean(0) for role in current[i]}
            step = _match(signature, target, current[i], groups[i], progress, {**how, "warm": True, "starts": 1})
            alignments[i] = step.after(alignments[i])
            current[i] = _apply(signature, step, current[i])
        objective.append(scatter(current))
        if progress:
            progress(f"round {round_number + 1}", objective[-1])
        if objective[-2] - objective[-1] <= tolerance * objective[-2]:
            break
    return Universe(alignments, centre, objective, {middle: star[0] for middle, star in stars.items()})


def scatter(models: Sequence[Tensors]) -> float:
    """J: the summed squared distance of all models to their mean."""
    total = 0.0
    for role in models[0]:
        stacked = torch.stack([tensors[role] for tensors in models])
        total += float((stacked - stacked.mean(0)).square().sum(dtype=torch.float64))
    return total


def _match(
    signature: Signature,
    anchor: Tensors,
    source: Tensors,
    groups: Mapping[str, Group],
    progress: Callable[[str, float], None] | None,
    how: Mapping[str, Any],
) -> Alignment:
    return match_weights(
        signature, lambda role: (anchor[role], source[role]), groups, roles=list(source), progress=progress, **how
    ).alignment


def _apply(signature: Signature, alignment: Alignment, tensors: Tensors) -> Tensors:
    return {role: alignment.apply(signature, role, tensor) for role, tensor in tensors.items()}
