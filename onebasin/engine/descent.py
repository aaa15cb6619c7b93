# SPDX-License-Identifier: Apache-2.0
"""A gradient descent that can be resumed: the optimisers and the best parameters so far, with checkpoints on disk.

Learned matching and distillation use it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .placing import appearing_file, clearly

MOST_STEPS = 10**5  # the limit where a run is bounded by time
WARM_UP, LAST = 10, 0.05  # steps until the full learning rate; the share of it that is left at the end
HARMED, EASED = 2.0, 0.3  # the share of the first held-out loss at which a careful run begins again, at what rate


@dataclass(frozen=True)
class Pace:
    """How far a descent goes, and how fast.

    Args:
        steps: Number of optimiser steps.
        lr: Learning rate.
        looks: How often a run evaluates the held-out loss.
        matrix_lr: Learning rate of matrices (default: `lr`).
        seconds: Time limit of a run. The learning rate then decays with the time or with the steps, whichever is nearer
            its end, and Ctrl-C ends the run early.
        careful: Whether the run begins again from the start, at 0.3 of its rate, whenever the held-out loss is more
            than twice that of the start and has never been below it: for starts that are good already.
    """

    steps: int
    lr: float
    looks: int
    matrix_lr: float | None = None
    seconds: float | None = None
    careful: bool = False


class Descent:
    """Adam on the `free` parameters, SGD with momentum on permutation scores, and Muon on matrices.

    Adam would move all scores of a permutation at the same rate, however little the loss depends on them, and so undo
    assignments that are already right. Scores and the other parameters move in alternate steps, so that each can have a
    loss of its own: see `moves_scores`. Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix and takes
    steps as long as Adam's (Liu et al., 2025).

    Args:
        free: The parameters.
        pace: Number of steps, learning rates and time limit.
        scores: Those of `free` that score the assignments of a permutation.
        matrices: Those of `free` that are matrices, or stacks of matrices.
        settings: What else defines the run; a checkpoint of other settings is refused.

    Attributes:
        losses: Step -> held-out loss; step 0 is the start.
    """

    def __init__(
        self,
        free: list[Tensor],
        pace: Pace,
        *,
        scores: Sequence[Tensor] = (),
        matrices: Sequence[Tensor] = (),
        **settings: Any,
    ) -> None:
        self.free, self.scores, self.pace, lr = free, scores, pace, pace.lr
        self.settings = {"steps": pace.steps, "lr": lr, "careful": pace.careful, **settings,
                         "shapes": [list(t.shape) for t in free]}  # fmt: skip
        apart = set(map(id, [*scores, *matrices]))
        others = [t for t in free if id(t) not in apart]
        self.optimizers: list[torch.optim.Optimizer] = []
        if others:
            self.optimizers.append(torch.optim.Adam(others, lr=lr, betas=(0.9, 0.95)))
        self.parts = {id(t): list(t.detach().view(-1, *t.shape[-2:])) for t in matrices}  # Muon takes no stacks
        if matrices:
            parts = [part for some in self.parts.values() for part in some]
            muon = torch.optim.Muon(
                parts, lr=pace.matrix_lr or lr, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw"
            )
            self.optimizers.append(muon)
        if scores:
            self.optimizers.append(torch.optim.SGD(scores, lr=lr, momentum=0.9))
        self.best: list[Tensor] = []  # copies of `free` at the least held-out loss
        self.best_step, self.since = 0, 0
        self.rate = 1.0  # share of the learning rates
        self.losses: dict[int, float] = {}

    def moves_scores(self, step: int) -> bool:
        """Return whether a step, counted from 1, moves the scores and nothing else: every odd one does."""
        return bool(self.scores) and (step % 2 == 1 or len(self.scores) == len(self.free))

    def descend(
        self,
        loss_at: Callable[[int], Tensor],
        held_out_loss: Callable[[], float],
        *,
        moved: Callable[[], None] = lambda: None,
        patience: int | None = None,
        checkpoint: str | Path | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Minimise `loss_at(step)` and leave `free` as it was at the least held-out loss.

        Args:
            loss_at: Step, counted from 1 -> the loss to minimise.
            held_out_loss: Returns the loss on held-out data for the current values of `free`.
            moved: Called whenever `free` has changed.
            patience: Stop after this many evaluations of the held-out loss without improvement.
            checkpoint: File in which the run is saved whenever the held-out loss is evaluated. If it exists, the run
                resumes from it, and ends as an uninterrupted one would.
            progress: Called with a text and the loss of the step.

        Raises:
            ValueError: The checkpoint belongs to another run, cannot be read, or its folder does not exist.
        """
        if checkpoint is not None and not (parent := Path(checkpoint).resolve().parent).is_dir():
            raise ValueError(f"there is no folder '{parent}' for the checkpoint; create it or choose another")
        pace = self.pace
        self._look(0, held_out_loss())
        begun = self._resume(checkpoint) if checkpoint is not None else 0
        if begun:
            moved()
        started, looked = time.perf_counter(), 0
        try:
            for step in range(begun + 1, pace.steps + 1):
                if not self.free or (patience is not None and self.since >= patience):
                    break
                gone = (step - 1) / max(pace.steps - 1, 1)
                if pace.seconds is not None:
                    gone = max(gone, (time.perf_counter() - started) / pace.seconds)
                if gone > 1:
                    break
                loss = loss_at(step)
                self._move(loss, self.rate * learning_rate(step, gone), self.moves_scores(step))
                moved()
                if progress:
                    total = pace.steps if pace.seconds is None else "as many as there is time for"
                    progress(f"step {step} of {total}", float(loss.detach()))
                if self._due(step, gone, looked):
                    looked += 1
                    self._look(step, held_out_loss())
                    if pace.careful and self.best_step == 0 and self.losses[step] > HARMED * self.losses[0]:
                        self.rate *= EASED
                        self._go_back()
                        moved()
                    if checkpoint is not None:
                        self._save(Path(checkpoint), step)
        except KeyboardInterrupt:
            if pace.seconds is None:
                raise
        self._go_back()
        moved()

    def _due(self, step: int, gone: float, looked: int) -> bool:
        """Whether the held-out loss should be evaluated now: after equal shares of the steps, or of the time."""
        pace = self.pace
        if pace.seconds is not None:
            return gone * pace.looks > looked + 1 or step == pace.steps
        return step % max(1, pace.steps // pace.looks) == 0 or step == pace.steps

    def _move(self, loss: Tensor, share: float, scores: bool) -> None:
        """Take a step, at a share of the full learning rates."""
        held = set(map(id, self.scores))
        numbers = [t for t in self.free if (id(t) in held) == scores]
        for number, slope in zip(numbers, torch.autograd.grad(loss, numbers, allow_unused=True), strict=True):
            if scores and slope is not None:
                slope = slope / slope.abs().max().clamp_min(torch.finfo(slope.dtype).tiny)
            parts = self.parts.get(id(number), [number])
            slopes = [None] * len(parts) if slope is None else slope.view(-1, *parts[0].shape)
            for part, its in zip(parts, slopes, strict=True):
                part.grad = its
        for optimizer in self.optimizers[-1:] if scores else self.optimizers[: -1 if self.scores else None]:
            optimizer.param_groups[0]["lr"] = share * optimizer.defaults["lr"]
            optimizer.step()

    def _look(self, step: int, loss: float) -> None:
        self.since += 1
        if not self.losses or loss < self.losses[self.best_step]:
            self.best, self.best_step, self.since = [t.detach().clone() for t in self.free], step, 0
        self.losses[step] = loss

    @torch.no_grad()
    def _go_back(self) -> None:
        for numbers, best in zip(self.free, self.best, strict=True):
            numbers.copy_(best)

    def _save(self, path: Path, step: int) -> None:
        """Save the whole state in one file, which appears whole or not at all."""
        state = {
            "settings": self.settings, "step": step, "free": self.free,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "best": self.best, "best_step": self.best_step, "since": self.since, "losses": self.losses,
            "rate": self.rate,
        }  # fmt: skip
        with clearly(path, "the checkpoint", kinds=(RuntimeError,)), appearing_file(path) as temporary:
            torch.save(state, temporary)

    def _resume(self, path: str | Path) -> int:
        """Load the state from a file, if it exists, and return its step."""
        if not Path(path).exists():
            return 0
        other = f"the checkpoint '{path}' belongs to another run; delete it or choose another file"
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"the checkpoint '{path}' cannot be read ({type(error).__name__}); delete it") from None
        if not isinstance(state, dict) or state.get("settings") != self.settings:
            raise ValueError(other)
        start = self.losses[0]  # the same models from the same start on the same data, up to rounding
        if abs(state["losses"][0] - start) > 1e-4 * abs(start):
            raise ValueError(other)
        with torch.no_grad():
            for mine, saved in zip(self.free, state["free"], strict=True):
                mine.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.best = [saved.to(mine) for mine, saved in zip(self.free, state["best"], strict=True)]
        self.best_step, self.since, self.losses = state["best_step"], state["since"], state["losses"]
        self.rate = state["rate"]
        step: int = state["step"]
        return step


def learning_rate(step: int, gone: float) -> float:
    """Return the share of the full learning rate at a step: linear warm-up, then linear decay.

    Args:
        step: Number of the step, counted from 1.
        gone: Share of the run that is over, from 0 to 1.
    """
    return min(step / WARM_UP, 1 - (1 - LAST) * gone)
