# SPDX-License-Identifier: Apache-2.0
"""Learned matching: alignments under which the average of the weights predicts what the models predict together.

Each source j starts from an alignment g_j (of weights or activations) and gets a factor e_j in front of it, an element
near the identity, made of free numbers that start at zero:

    orthogonal           expm(A - A^T); in the complement of 1 where ones are fixed; times e^s where scales are allowed
    rotary               e^(s + i phi) per pair
    invertible           1 + Z, with the inverse transpose for what reads
    scales of neurons    e^s

so that step 0 is the start itself. Permutations stay as the start has them. With w drawn near equal weights,

    M = w_0 A + sum_j w_j (e_j g_j)(B_j),        loss = KL(sum_j w_j p_j || p_M),

where p are the models' own predictions: no labels. The gradient goes through the stock model into the free numbers.
Ainsworth et al., 2023, section 3.3 learn permutations through the merged model's loss by a straight-through estimator;
here every map is smooth.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoint.trace import Batch
from onebasin.data.teaching import Forward, Loss, Teachers, descent_plan, divergence, held_out, learning_rate
from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.axes import blocks
from onebasin.symmetry.groups import (
    Factors,
    Invertible,
    Orthogonal,
    OrthogonalFixingOnes,
    Rotary,
    ScaledOrthogonal,
    ScaledPermutation,
)
from onebasin.symmetry.groups.orthogonal import complement_of_ones
from onebasin.symmetry.groups.signs import diagonal, pairs
from onebasin.symmetry.maps import Element, Linear, Monomial, act_on

Latent = Mapping[str, Tensor]  # the free numbers of one element, by name

LOOKS = 20  # at the held-back loss in one run


@dataclass(frozen=True)
class Learned:
    """alignments: one per source. step: the one with the least loss on held-back batches, which they are from.

    losses: step -> loss on held-back batches at equal weights; step 0 is the start.
    """

    alignments: list[Alignment]
    step: int
    losses: dict[int, float] = field(default_factory=dict)


def match_learned(
    signature: Signature,
    anchor: Mapping[str, Tensor],
    sources: Sequence[Mapping[str, Tensor]],
    starts: Sequence[Alignment],
    groups: Mapping[str, Group],
    forward: Forward,
    batches: Sequence[Batch],
    *,
    held_back: Sequence[Batch] | None = None,
    steps: int = 200,
    lr: float = 8e-3,
    seed: int = 0,
    loss: Loss | None = None,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Learned:
    """Learn the alignments of sources to an anchor, all together.

    signature: of all models. anchor, sources: role -> tensor, all roles that `forward` needs, of equal shapes, in the
    dtype and on the device of the mathematics. starts: one alignment per source. groups: root space -> what may act.
    batches: inputs; one makes a step. held_back: batches to choose the step by (default: a sixteenth of `batches`, at
    least one, which then teach nothing). loss: default `divergence`. patience: stop after so many looks at the
    held-back loss (there are 20) that bring nothing; None runs all steps. checkpoint: a file that the run is saved in
    at every look, and continued from where it exists; a continued run ends as an undisturbed one does. progress: called
    with a text and the loss.

    Raises ValueError for too few batches, models of different shapes, a learning rate or number of steps that is not
    positive, and for a checkpoint of another run.
    """
    loss = loss or divergence
    _check(anchor, sources, starts, steps, lr)
    fit, held = held_out(batches, held_back)
    with torch.no_grad():
        aligned = [
            {role: start.apply(signature, role, tensor) for role, tensor in source.items()}
            for source, start in zip(sources, starts, strict=True)
        ]
    some = next(iter(anchor.values()))
    latents = [zeros(signature, groups, some) for _ in sources]
    free = [number for latent in latents for numbers in latent.values() for number in numbers.values()]
    teachers = Teachers([partial(forward, tensors) for tensors in (anchor, *sources)])

    def merged(shares: Sequence[float]) -> dict[str, Tensor]:
        return blend(signature, groups, anchor, aligned, latents, shares)

    @torch.no_grad()
    def held_back_loss() -> float:
        shares = [1 / (len(sources) + 1)] * (len(sources) + 1)
        tensors = merged(shares)
        losses = [loss(forward(tensors, batch), teachers(batch), shares, batch) for batch in held]
        return float(torch.stack(losses).mean())

    run = _Run({"steps": steps, "lr": lr, "seed": seed, "batches": len(fit), "sources": len(sources)}, free, lr)
    run.look(0, held_back_loss())
    begun = run.resume(checkpoint) if checkpoint is not None else 0
    order, weights = descent_plan(seed, steps, len(fit), len(sources) + 1)
    every = max(1, steps // LOOKS)
    for step in range(begun + 1, steps + 1):
        if not free or (patience is not None and run.since >= patience):
            break
        batch, shares = fit[order[step - 1]], weights[step - 1]
        value = loss(forward(merged(shares), batch), teachers(batch), shares, batch)
        run.descend(value, lr * learning_rate(step, steps))
        if progress:
            progress(f"learning: step {step} of {steps}", float(value.detach()))
        if step % every == 0 or step == steps:
            run.look(step, held_back_loss())
            if checkpoint is not None:
                run.save(Path(checkpoint), step)
    run.take_best()
    found = [
        _finished(groups, start, _factor(signature, groups, _double(latent)), signature)
        for start, latent in zip(starts, latents, strict=True)
    ]
    return Learned(found, run.best_step, run.losses)


def blend(
    signature: Signature,
    groups: Mapping[str, Group],
    anchor: Mapping[str, Tensor],
    sources: Sequence[Mapping[str, Tensor]],
    latents: Sequence[Mapping[str, Latent]],
    shares: Sequence[float],
) -> dict[str, Tensor]:
    """shares[0] A + sum_j shares[j] e_j(B_j), differentiable in the latents that stand for e_j."""
    total = {role: shares[0] * tensor for role, tensor in anchor.items()}
    for share, tensors, latent in zip(shares[1:], sources, latents, strict=True):
        factor = _factor(signature, groups, latent)
        for role, tensor in tensors.items():
            total[role] = total[role] + share * _moved(signature, factor, role, tensor)
    return total


# --- the free numbers ---------------------------------------------------------------------------------------------


def zeros(signature: Signature, groups: Mapping[str, Group], like: Tensor) -> dict[str, Latent]:
    """Root space -> the free numbers of its element, all zero: the identity. Permutations and signs have none."""
    found: dict[str, Latent] = {}
    for root, group in groups.items():
        space = signature.spaces[root]
        batch, n = tuple(signature.spaces[key].size for key in space.batch), space.size
        shapes: dict[str, tuple[int, ...]] = {}
        match group:
            case Orthogonal():
                shapes = {"turn": (*batch, n, n)}
            case OrthogonalFixingOnes():
                shapes = {"turn": (*batch, n - 1, n - 1)}
            case ScaledOrthogonal():
                shapes = {"turn": (*batch, n, n), "stretch": batch}
            case Rotary():
                shapes = {"phase": (*batch, n // 2)}
                if group.rescale != "none":
                    shapes["stretch"] = (*batch, n // 2)
            case Invertible():
                shapes = {"shear": (*batch, n, n)}
            case ScaledPermutation() | Factors():
                shapes = {"stretch": (*batch, n)}
        if shapes:
            found[root] = {name: like.new_zeros(shape).requires_grad_() for name, shape in shapes.items()}
    return found


def _factor(signature: Signature, groups: Mapping[str, Group], latents: Mapping[str, Latent]) -> Alignment:
    elements = {root: element_of(groups[root], latent) for root, latent in latents.items()}
    return Alignment(elements, {root: signature.spaces[root].batch for root in elements})


def _moved(signature: Signature, factor: Alignment, role: str, tensor: Tensor) -> Tensor:
    """`factor.apply`, which for tensors of several blocks (fused queries, keys and values) lets no gradient through.

    A view can be written with a gradient only if what it is a view of has one before: hence the clone.
    """
    axes = signature.tensors[role].axes
    pieces = blocks(tensor, axes, signature.sizes)
    if len(pieces) == 1:
        return factor.apply(signature, role, tensor)
    out = torch.empty_like(tensor).requires_grad_().clone()
    for (piece, leaves), (target, _) in zip(pieces, blocks(out, axes, signature.sizes), strict=True):
        roots = [signature.root.get(leaf.space, "") for leaf in leaves]
        for dim, (leaf, root) in enumerate(zip(leaves, roots, strict=True)):
            if root in factor.elements:
                batch = tuple(map(roots.index, factor.batch[root]))
                piece = act_on(piece, factor.elements[root], batch, dim, leaf.dual)
        target.copy_(piece)
    return out


def element_of(group: Group, latent: Latent) -> Element:
    """The element of a group that free numbers stand for; zeros are the identity. Differentiable."""
    if "shear" in latent:
        z = latent["shear"]
        matrix = torch.eye(z.shape[-1]).to(z) + z
        return Linear(matrix, torch.linalg.inv(matrix).mT)
    if "phase" in latent:
        assert isinstance(group, Rotary)
        turn, stretch = _turned(latent["phase"], group.interleaved), latent.get("stretch")
        if stretch is None:
            return Linear(turn)
        scale = stretch[..., _pair_of(turn.shape[-1], group.interleaved)].exp().unsqueeze(-1)
        return Linear(scale * turn, turn / scale)
    if "turn" not in latent:
        return diagonal(latent["stretch"].exp())
    turn = torch.linalg.matrix_exp(latent["turn"] - latent["turn"].mT)
    if isinstance(group, OrthogonalFixingOnes):
        basis = complement_of_ones(turn.shape[-1] + 1).to(turn)
        return Linear(basis @ turn @ basis.mT + 1 / basis.shape[0])
    if "stretch" in latent:
        scale = latent["stretch"].exp()[..., None, None]
        return Linear(scale * turn, turn / scale)
    return Linear(turn)


def _pair_of(n: int, interleaved: bool) -> Tensor:
    """The number of the pair that each of n dimensions belongs to."""
    places = pairs(n, interleaved)
    return torch.argsort(places.T.flatten()) // 2


def _turned(phase: Tensor, interleaved: bool) -> Tensor:
    """Every pair turned by its angle: (*batch, n / 2) -> (*batch, n, n)."""
    n = 2 * phase.shape[-1]
    first, second = pairs(n, interleaved)
    quarter = phase.new_zeros(n, n)
    quarter[second, first], quarter[first, second] = 1.0, -1.0
    angle = phase[..., _pair_of(n, interleaved)].unsqueeze(-1)
    return angle.cos() * torch.eye(n).to(phase) + angle.sin() * quarter


def _double(latents: Mapping[str, Latent]) -> dict[str, Latent]:
    return {root: {name: t.detach().double() for name, t in latent.items()} for root, latent in latents.items()}


def _finished(groups: Mapping[str, Group], start: Alignment, factor: Alignment, signature: Signature) -> Alignment:
    """`factor * start` in float64, with the rounding of either taken off."""
    batch = {**{root: signature.spaces[root].batch for root in start}, **start.batch}
    whole = factor.after(Alignment({root: _in_double(element) for root, element in start.elements.items()}, batch))
    exact = {root: _exact(groups[root], whole.elements[root]) for root in factor}
    return Alignment({**whole.elements, **exact}, whole.batch)


def _in_double(element: Element) -> Element:
    if isinstance(element, Monomial):
        return Monomial(element.index, None if element.scale is None else element.scale.double())
    return Linear(element.matrix.double(), None if element.dual is None else element.dual.double())


def _exact(group: Group, element: Element) -> Element:
    if isinstance(element, Monomial):
        return element
    if element.dual is not None:
        return Linear(element.matrix, torch.linalg.inv(element.matrix).mT)
    if isinstance(group, (ScaledOrthogonal, Invertible)):
        return Orthogonal().nearest(_like(element.matrix))
    nearest: Element = group.nearest(_like(element.matrix))
    return nearest


def _like(matrix: Tensor) -> Moments:
    """Moments whose nearest element is the one nearest to a matrix."""
    nothing = matrix.new_zeros(matrix.shape[:-1])
    return Moments(matrix, torch.zeros_like(matrix), nothing, nothing)


# --- the run ------------------------------------------------------------------------------------------------------


class _Run:
    """The optimiser's state, the best numbers so far, and both on disk."""

    def __init__(self, settings: dict[str, Any], free: list[Tensor], lr: float) -> None:
        self.settings = {**settings, "shapes": [list(t.shape) for t in free]}
        self.free = free
        self.adam = torch.optim.Adam(free, lr=lr, betas=(0.9, 0.95)) if free else None
        self.best = [t.detach().clone() for t in free]
        self.best_step, self.since = 0, 0
        self.losses: dict[int, float] = {}

    def descend(self, loss: Tensor, lr: float) -> None:
        assert self.adam is not None
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()

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
        assert self.adam is not None
        state = {
            "settings": self.settings, "step": step, "free": self.free, "adam": self.adam.state_dict(),
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
        if not isinstance(state, dict) or state.get("settings") != self.settings or self.adam is None:
            raise ValueError(other)
        start = self.losses[0]  # the same models from the same start on the same data, up to rounding
        if abs(state["losses"][0] - start) > 1e-4 * abs(start):
            raise ValueError(other)
        with torch.no_grad():
            for mine, saved in zip(self.free, state["free"], strict=True):
                mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.best = [saved.to(mine) for mine, saved in zip(self.free, state["best"], strict=True)]
        self.best_step, self.since, self.losses = state["best_step"], state["since"], state["losses"]
        step: int = state["step"]
        return step


def _check(
    anchor: Mapping[str, Tensor],
    sources: Sequence[Mapping[str, Tensor]],
    starts: Sequence[Alignment],
    steps: int,
    lr: float,
) -> None:
    if steps < 1 or not 0 < lr < float("inf"):
        raise ValueError("learned matching needs at least one step and a positive learning rate")
    if not sources or len(sources) != len(starts):
        raise ValueError("learned matching needs a start for every source")
    for source in sources:
        for role in sorted(anchor.keys() ^ source.keys()):
            raise ValueError(f"learned matching needs models of one shape: only one of them has '{role}'")
        for role, tensor in anchor.items():
            if tensor.shape != source[role].shape:
                shapes = f"{tuple(tensor.shape)} and {tuple(source[role].shape)}"
                raise ValueError(f"learned matching needs models of one shape: '{role}' has the shapes {shapes}")
