# SPDX-License-Identifier: Apache-2.0
"""Learned matching: alignments under which the average of the weights predicts what the models predict together.

Each source j starts from an alignment g_j (of weights or activations), followed by an element e_j near the identity
with free parameters (`latents`), so that step 0 is the start itself. With weights w drawn from a range (two models) or
a Dirichlet distribution (more),

    M = w_0 A + sum_j w_j (e_j g_j)(B_j),        loss = KL(sum_j w_j p_j || p_M),

where p are the models' own predictions, so no labels are needed. The gradient goes through the stock model into the
parameters. Ainsworth et al., 2023, section 3.3 learn permutations through the merged model's loss; Theus et al., 2025
also learn rotations of the stream, for two models or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from onebasin.data.teaching import LOSSES, Forward, Teachers, drawn_order, drawn_shares, mean_loss, split_held_out
from onebasin.engine import MOST_STEPS, Descent, Pace
from onebasin.models.pairing import refuse_unlike
from onebasin.running.trace import Batch
from onebasin.settings import Concentration, Count, Interval, Rate, Seconds, Seeded, setting
from onebasin.symmetry import Alignment, Group, Signature
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.groups.elements import Acts
from onebasin.symmetry.groups.group import MATRICES

from .latents import Latent, blend, finished, zeros

MATRIX_LR = 3  # of Adam's: rotations and invertible maps move by Muon (measured: docs/results/zero-barrier.md)
LOOKS = 20  # evaluations of the held-out loss in a run
LEAN = 0.1  # weight of all sources together where orders are learned


@dataclass(frozen=True)
class Learning(Seeded):
    """Settings of learned matching: gradient descent, from `start`, on a loss of the average of all models."""

    section: ClassVar[str] = "Learned matching"

    start: Literal["weights", "activations", "none"] = setting(
        "weights", "The matching that learning starts from: weights, activations or none."
    )
    steps: Count = setting(200, "Steps of learning.")
    lr: Rate = setting(8e-3, "The largest learning rate of learning.")
    patience: Count | None = setting(
        None, "End learning after this many of its 20 validation checks without improvement [default: never]."
    )
    loss: Literal["divergence", "logits", "task"] = setting(
        "divergence",
        "What learning lowers: divergence from the models' predictions, the distance from their logits, or the "
        "task's own loss.",
    )
    permutations: Literal["fixed", "straight-through", "sinkhorn"] = setting(
        "fixed",
        "In learning: fixed keeps those of the start; straight-through also learns them; sinkhorn (merge only) mixes "
        "neurons, and the averaged models then no longer compute the functions of their sources.",
    )
    mixed: bool = setting(False, "Learn with products in bfloat16: faster if the hardware supports it.")
    seconds: Seconds | None = setting(
        None, "Learn for this many seconds instead of a number of steps [default: all steps]."
    )
    lambda_range: Interval = setting(
        factory=lambda: [0.4, 0.6],
        help="In learning of two models: the range that the second's weight is drawn from, such as 0,1 "
        "[default: 0.4,0.6].",
    )
    concentration: Concentration = setting(
        20.0,
        "In learning of more models: their weights are drawn from a Dirichlet distribution with this concentration; 1 "
        "is uniform, less is near the simplex's edges and corners.",
    )
    checkpoint: str | None = setting(None, "File to save the state of learning in, and to continue from.")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.lambda_range
        if low > high:
            raise ValueError(f"lambda-range {low:g},{high:g}: give the lower end first")


@dataclass(frozen=True)
class Learned:
    """alignments: one per source. step: their step, which is the one with the least loss on held-out batches.

    losses: step -> loss on held-out batches at equal weights; step 0 is the start. couplings: per source, to be applied
    after its alignment; empty unless permutations were relaxed.
    """

    alignments: list[Alignment]
    step: int
    losses: dict[int, float] = field(default_factory=dict)
    couplings: list[dict[str, Coupling]] = field(default_factory=list)


@dataclass(frozen=True)
class Lessons:
    """The data of learning.

    forward: computes a model's outputs for a batch. batches: inputs, one for each step. held_out: batches to choose the
    best step by (default: a sixteenth of `batches`, at least one, which are then not used for steps).
    """

    forward: Forward
    batches: Sequence[Batch]
    held_out: Sequence[Batch] | None = None


def match_learned(
    signature: Signature,
    models: Sequence[Mapping[str, Tensor]],
    starts: Sequence[Alignment],
    groups: Mapping[str, Group],
    lessons: Lessons,
    how: Learning | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Learned:
    """Learn the alignments of all sources to an anchor together.

    Args:
        signature: Of all models.
        models: Role -> tensor of the anchor, then of each source: all roles that the forward pass needs, of equal
            shapes, in the dtype and on the device of the arithmetic.
        starts: One alignment per source.
        groups: Root space -> the group that acts on it.
        lessons: The data.
        how: The settings (default: those of `Learning()`). A run continued from a checkpoint has the same result as one
            without a break.
        progress: Called with a text and the loss.

    Raises:
        ValueError: There are too few batches, models of different shapes, or a checkpoint of another run.
    """
    how, forward = how or Learning(), lessons.forward
    anchor, *sources = models
    if not sources or len(sources) != len(starts):
        raise ValueError("learned matching needs a start for every source")
    for source in sources:
        refuse_unlike(anchor, source, "learned matching needs models of one shape")
    loss = LOSSES[how.loss]
    fit, held = split_held_out(lessons.batches, lessons.held_out)
    with torch.no_grad():
        aligned = [
            {role: start.apply(signature, role, tensor) for role, tensor in source.items()}
            for source, start in zip(sources, starts, strict=True)
        ]
    moving = _Moving(groups, [zeros(signature, groups, next(iter(anchor.values())), how.permutations) for _ in sources])
    answers = Teachers([partial(forward, tensors) for tensors in models])
    equal = [1 / (len(sources) + 1)] * (len(sources) + 1)

    def merged(shares: Sequence[float]) -> dict[str, Tensor]:
        return blend(signature, anchor, aligned, moving.elements(), shares)

    @torch.no_grad()
    def held_out_loss() -> float:
        return mean_loss(loss, partial(forward, merged(equal)), answers, equal, held)

    steps = MOST_STEPS if how.seconds else how.steps
    rng = np.random.default_rng(how.seed)
    order = drawn_order(rng, steps, len(fit))
    weights = drawn_shares(rng, steps, len(models), how.lambda_range, how.concentration)

    def loss_at(step: int) -> Tensor:
        batch, shares = fit[order[step - 1]], weights[step - 1]
        if run.moves_scores(step):
            shares = leaning(shares)
        return loss(forward(merged(shares), batch), answers(batch), shares, batch)

    pace = Pace(steps, how.lr, LOOKS, MATRIX_LR * how.lr, how.seconds)
    run = Descent(moving.free, pace, scores=moving.scores, matrices=moving.matrices, seed=how.seed, batches=len(fit),
                  sources=len(sources), permutations=how.permutations, interval=how.lambda_range, mixed=how.mixed,
                  concentration=how.concentration)  # fmt: skip
    run.descend(loss_at, held_out_loss, moved=moving.forget, patience=how.patience, checkpoint=how.checkpoint,
                progress=progress)  # fmt: skip
    found = [finished(signature, groups, *pair) for pair in zip(starts, moving.latents, strict=True)]
    return Learned([item[0] for item in found], run.best_step, run.losses, [item[1] for item in found])


def leaning(shares: Sequence[float]) -> list[float]:
    """Return weights for learning permutations: nearly all on the anchor, the rest in the sources' proportions.

    With D = P B - A the loss at A + w D is w^2 / 2 |J D - r|^2 + O(w^3) (J the anchor's Jacobian, r the difference of
    predictions, the norm that of Fisher's matrix): convex in P. At the midpoint it is not: if P exchanges two neurons,
    or restores two that were exchanged, the average has two equal neurons, hence G two equal rows, and
    <G, swap - 1> = 0. Every such permutation is a saddle there, which straight-through gradients never leave.
    """
    sources = sum(shares[1:])
    parts = [share / sources if sources else 1 / len(shares[1:]) for share in shares[1:]]
    return [1 - LEAN, *(LEAN * part for part in parts)]


class _Moving:
    """The parameters of all sources, and their elements, which are computed once for every state of the parameters.

    An evaluation of the held-out loss and the step after it share them.
    """

    def __init__(self, groups: Mapping[str, Group], latents: Sequence[Mapping[str, Latent]]) -> None:
        self.groups, self.latents = groups, latents
        named = [pair for all_of in latents for latent in all_of.values() for pair in latent.items()]
        self.free = [numbers for _, numbers in named]
        self.scores = [numbers for name, numbers in named if name == "order"]
        self.matrices = [numbers for name, numbers in named if name in MATRICES and numbers.numel()]
        self._made: list[dict[str, Acts]] | None = None

    def elements(self) -> list[dict[str, Acts]]:
        if self._made is None:
            with torch.enable_grad():
                self._made = [
                    {root: self.groups[root].element(latent) for root, latent in all_of.items()}
                    for all_of in self.latents
                ]
        return self._made

    def forget(self) -> None:
        """Discard the elements, after the parameters have changed."""
        self._made = None
