# SPDX-License-Identifier: Apache-2.0
"""Many models at once: every model gets one alignment into a shared frame, so any cycle composes to the identity.

With T_i the i-th aligned model the objective is the scatter about the mean,

    J = sum_i |T_i - mean|^2 = (1 / m) sum_{i<j} |T_i - T_j|^2.

Given all others, the best T_i is the one closest to the mean of the *others*: sum_{j != i} |T_i - T_j|^2 equals
(m - 1) |T_i - mean_{j != i}|^2 plus a constant. Matching each model in turn to the mean of the others is therefore
block coordinate descent on J itself, and J never increases. (Matching to the mean of *all*, the model included, is
not: each model is then pulled towards its own position.) The descent starts from the best star, so its result is never
worse than matching all models to one of them. The idea of a universe is that of Crisostomi et al., "C2M3:
Cycle-Consistent Multi-Model Merging", NeurIPS 2024, for permutations.

Models are read and rewritten tensor by tensor whenever they are used, so that none has to be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onebasin.engine import in_order
from onebasin.symmetry import Alignment, Group, Signature

from .coordinate_descent import Run
from .weights import Weights, match_weights

Read = Callable[[str], Tensor]  # role -> tensor
ROUNDS = 20  # over all models


@dataclass
class Universe:
    """alignments: one per model, into the frame of `centre`, whose own is the identity. objective: J of the best star,
    then after every round. stars: J of the star around each model that was tried.
    """

    alignments: list[Alignment]
    centre: int
    objective: list[float]
    stars: dict[int, float]


def match_universe(
    signatures: Sequence[Signature],
    models: Sequence[Read],
    groups: Sequence[Mapping[str, Group]],
    how: Weights | None = None,
    *,
    roles: Sequence[str],
    centre: int | None = None,
    run: Run | None = None,
) -> Universe:
    """Align m models to one another.

    Args:
        signatures: Of each model.
        models: Per model, role -> tensor, of equal shapes for each of `roles`; called whenever a tensor is used, from
            several threads.
        groups: Per model, root space -> the group that acts on it.
        how: As in `match_weights`; rounds end by the same criteria as its sweeps, and after `ROUNDS` at the latest.
        roles: The tensors to compare.
        centre: The model that is not changed (default: the centre of the best star).
        run: As in `match_weights`.
    """
    how, run = how or Weights(), run or Run()

    def current(alignments: Sequence[Alignment]) -> list[Read]:
        return [partial(_moved, *one) for one in zip(signatures, alignments, models, strict=True)]

    def matched(i: int, anchor: Read, start: Alignment | None = None) -> Alignment:
        def read(role: str) -> tuple[Tensor, Tensor]:
            return anchor(role), models[i](role)

        return match_weights(signatures[i], read, groups[i], how, roles=roles, start=start, run=run).alignment

    stars: dict[int, tuple[float, list[Alignment]]] = {}
    for middle in range(len(models)) if centre is None else [centre]:
        alignments = [Alignment() if i == middle else matched(i, models[middle]) for i in range(len(models))]
        stars[middle] = scatter(current(alignments), roles, run.workers), alignments
    centre = min(stars, key=lambda middle: stars[middle][0])
    value, alignments = stars[centre]
    objective = [value]
    for round_number in range(min(ROUNDS, how.max_sweeps) if len(models) > 2 else 0):
        for i in range(len(models)):
            if i == centre:  # it defines the frame, since only relative positions matter
                continue
            now = current(alignments)
            alignments[i] = matched(i, partial(_mean, [*now[:i], *now[i + 1 :]]), alignments[i])
        objective.append(scatter(current(alignments), roles, run.workers))
        if run.progress:
            run.progress(f"round {round_number + 1}", objective[-1])
        if objective[-2] - objective[-1] <= how.tolerance * objective[-2]:
            break
    if (apart := scatter(models, roles, run.workers)) <= objective[
        -1
    ]:  # because of rounding, as among copies of one model
        alignments, objective = [Alignment() for _ in models], [*objective, apart]
    return Universe(alignments, centre, objective, {middle: star[0] for middle, star in stars.items()})


def scatter(models: Sequence[Read], roles: Sequence[str], workers: int | None = 1) -> float:
    """Return J, the summed squared distance of all models to their mean."""

    def of(role: str) -> float:
        stacked = torch.stack([read(role) for read in models])
        return float((stacked - stacked.mean(0)).square().sum(dtype=torch.float64))

    return sum(in_order(of, roles, workers))


def _mean(models: Sequence[Read], role: str) -> Tensor:
    return torch.stack([read(role) for read in models]).mean(0)


def _moved(signature: Signature, alignment: Alignment, read: Read, role: str) -> Tensor:
    return alignment.apply(signature, role, read(role))
