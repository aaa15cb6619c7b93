# SPDX-License-Identifier: Apache-2.0
"""A gradient descent that can stop and go on: the optimiser, the best numbers so far, and both on disk."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Descent:
    """Adam on `free`, but plain momentum on those of them that are `scores` of permutations: Adam would move every
    score of a matrix alike, however little the loss depends on it, and so reshuffle what is right already.

    settings: of the run, compared where a saved one is taken up again.
    """

    def __init__(self, settings: dict[str, Any], free: list[Tensor], scores: Sequence[Tensor], lr: float) -> None:
        self.settings = {**settings, "shapes": [list(t.shape) for t in free]}
        self.free, self.scores = free, scores
        kinds = ([t for t in free if all(t is not score for score in scores)], list(scores))
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(numbers, lr=lr, betas=(0.9, 0.95)) if place == 0 else
            torch.optim.SGD(numbers, lr=lr, momentum=0.9)
            for place, numbers in enumerate(kinds) if numbers
        ]  # fmt: skip
        self.best = [t.detach().clone() for t in free]
        self.best_step, self.since = 0, 0
        self.losses: dict[int, float] = {}

    def descend(self, loss: Tensor, lr: float) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = lr
        loss.backward()  # type: ignore[no-untyped-call]
        for score in self.scores:
            assert score.grad is not None
            score.grad /= score.grad.abs().max().clamp_min(torch.finfo(score.dtype).tiny)
        for optimizer in self.optimizers:
            optimizer.step()

    def look(self, step: int, loss: float) -> None:
        self.since += 1
        if not self.losses or loss < self.losses[self.best_step]:
            self.best, self.best_step, self.since = [t.detach().clone() for t in self.free], step, 0
        self.losses[step] = loss

    def take_best(self) -> None:
        with torch.no_grad():
            for numbers, best in zip(self.free, self.best, strict=True):
                numbers.copy_(best)

    def save(self, path: Path, step: int) -> None:
        """The whole state in one file, which appears whole or not at all."""
        state = {
            "settings": self.settings, "step": step, "free": self.free,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "best": self.best, "best_step": self.best_step, "since": self.since, "losses": self.losses,
        }  # fmt: skip
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def resume(self, path: str | Path) -> int:
        """Take the state from a file, if it is there; return the step that it stands at."""
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
        step: int = state["step"]
        return step
