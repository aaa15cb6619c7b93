# SPDX-License-Identifier: Apache-2.0
"""Progressive merging: the merged model's linear layers are fitted one after another, in closed form.

Start from the plain average of aligned models. In the order of execution, let X be the inputs of a layer in the
*merged* model as it is by now, W its averaged weights (a bias is one more input, always 1), R what its output lacks:

    R = sum_j w_j Y_j - Y        Y: the layer's output; for layers that write the residual stream, the stream after it
    W <- W + (X^T X + r D)^-1 X^T R        D = diag(X^T X)

the least-squares solution with a ridge r towards the average. Because X comes from the merged model and R compares
with the stream rather than with the layer's own output, each layer also repairs what earlier ones left wrong. With all
weight on one model, or with equal models, R is zero and nothing changes.

RegMean (Jin et al., 2023, Eq. 2) solves the same kind of problem with the inputs of the models that are merged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from onebasin.checkpoint import Checkpoint, CheckpointError
from onebasin.checkpoint.stock import Stock, stock_model
from onebasin.checkpoint.trace import Batch, Call, hooks, linear_calls, run
from onebasin.data.teaching import Teachers, divergence, forward_of, held_out, mean_loss
from onebasin.symmetry import Alignment

from .average import merged_tensors
from .lockstep import Pass, current, pause

RIDGES = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Progressive:
    """tensors: role -> merged tensor. ridge: the one chosen; None where the plain average was better than all.

    losses: ridge -> loss on held-back data (None: the plain average), empty where there was nothing to choose.
    skipped: linear layers that keep their average, because the models do not share them or they are tied.
    """

    tensors: dict[str, Tensor]
    ridge: float | None
    losses: dict[float | None, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def merge_progressively(
    models: Sequence[Checkpoint],
    alignments: Sequence[Alignment],
    weights: Sequence[float],
    layout: int,
    shared: Collection[str],
    batches: Sequence[Batch],
    *,
    ridge: float | Sequence[float] = RIDGES,
    held_back: Sequence[Batch] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tell: Callable[[str], None] | None = None,
) -> Progressive:
    """Merge aligned models over calibration batches; arguments as in `merged_tensors`.

    batches: inputs of the models; padding is left out where there is an attention_mask. ridge: one value, or several,
    of which the one with the least loss on `held_back` is taken (default: a sixteenth of the batches, at least one,
    which then fit nothing). The loss is the KL divergence of the merged model's prediction from the mixture of the
    models' predictions; for models without logits, the squared distance from their mean output.

    Raises ValueError for too few batches, and CheckpointError for a model whose layers cannot be followed.
    """
    ridges = [float(ridge)] if isinstance(ridge, (int, float)) else [float(one) for one in ridge]
    if not ridges or min(ridges) <= 0:
        raise ValueError("the ridge of progressive merging must be positive")
    if not batches:
        raise ValueError("progressive merging needs calibration data")
    fit, held = held_out(batches, held_back) if len(ridges) > 1 else (list(batches), [])
    teachers = [stock_model(m, a, dtype=dtype, device=device) for m, a in zip(models, alignments, strict=True)]
    student = stock_model(models[layout], dtype=dtype, device=device)
    by_name = {entry.name: role for role, entry in student.signature.tensors.items()}
    average = {
        by_name[name]: tensor
        for name, tensor in merged_tensors(models, alignments, weights, layout, shared, dtype=dtype, device=device)
    }
    student.fill(average.__getitem__)
    example = {key: value[:2] for key, value in fit[0].items()}
    calls = linear_calls(student, example)
    fitted = [call for call in calls if call.weight in shared and not student.shared(call.weight)]
    students = [copied(student) for _ in ridges]
    fit_layers(teachers, students, weights, ridges, fitted, fit, tell)
    chosen: int | None = 0
    losses: dict[float | None, float] = {}
    if held:
        answers = Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in teachers])
        shares = [weight / sum(weights) for weight in weights]
        scores = [
            mean_loss(divergence, partial(forward_of(one), one.parameter), answers, shares, held)
            for one in (student, *students)
        ]
        losses = dict(zip((None, *ridges), scores, strict=True))
        best = min(range(len(scores)), key=scores.__getitem__)
        chosen = best - 1 if best else None
    if chosen is not None:
        average.update({role: tensor.detach() for role, tensor in students[chosen].parameter.items()})
    skipped = [call.weight for call in calls if call not in fitted]
    return Progressive(average, None if chosen is None else ridges[chosen], losses, skipped)


def copied(stock: Stock) -> Stock:
    """A copy with tensors of its own."""
    model = copy.deepcopy(stock.model)
    named = {id(old): new for old, new in zip(stock.model.parameters(), model.parameters(), strict=True)}
    return replace(stock, model=model, parameter={role: named[id(p)] for role, p in stock.parameter.items()})


# --- the fit ----------------------------------------------------------------------------------------------------


def fit_layers(
    teachers: Sequence[Stock],
    students: Sequence[Stock],
    weights: Sequence[float],
    ridges: Sequence[float],
    calls: Sequence[Call],
    batches: Sequence[Batch],
    tell: Callable[[str], None] | None = None,
) -> None:
    """Walk teachers and students through all batches together, and fit each layer of every student on the way.

    A layer that is called several times in one pass is fitted at each call to all calls so far.
    """
    walks = [_Walk(stock, calls, batches) for stock in (*teachers, *students)]
    masks = [batch.get("attention_mask") for batch in batches]
    sums: dict[tuple[int, str], _Fit] = {}
    try:
        for number, call in enumerate(calls, 1):
            if tell:
                tell(f"fitting layer {number} of {len(calls)}: {call.module}")
            seen = [walk.advance(call) for walk in walks]
            for i, student in enumerate(students):
                fit = sums.setdefault((i, call.module), _Fit(student, call))
                mine = seen[len(teachers) + i]
                for b, here in enumerate(mine):
                    lacking = -here.value
                    for j, weight in enumerate(weights):
                        lacking += weight * seen[j][b].value
                    fit.add(here.inputs, lacking, masks[b])
                delta = fit.solve(ridges[i])
                for here in mine:
                    here.value.add_(fit.extended(here.inputs) @ delta)
    finally:
        for walk in walks:
            walk.close()


@dataclass(frozen=True)
class _Seen:
    """inputs: of the layer. value: its output, or the norm's input that it is a part of; edits reach the rest."""

    inputs: Tensor
    value: Tensor


class _Walk:
    """One model's passes over all batches, which stop where the calls are measured."""

    def __init__(self, stock: Stock, calls: Sequence[Call], batches: Sequence[Batch]) -> None:
        of_module: dict[str, list[Call]] = {}
        for call in calls:
            of_module.setdefault(call.module, []).append(call)

        def returned(name: str) -> Callable[[Tensor, Tensor], None]:
            def look(x: Tensor, y: Tensor) -> None:
                here = current()
                call = of_module[name][here.counts[name]]
                here.counts[name] += 1
                if call.norm:
                    here.held[call.norm] = (call, x)
                else:
                    pause(call, x, y)

            return look

        def called(name: str) -> Callable[[Tensor], None]:
            def look(n: Tensor) -> None:
                if name in current().held:
                    pause(*current().held.pop(name), n)

            return look

        norms = {call.norm for call in calls if call.norm}
        self._hooks = hooks(stock, {name: returned(name) for name in of_module}, {name: called(name) for name in norms})
        self._hooks.__enter__()
        self.passes = [Pass(partial(run, stock, batch)) for batch in batches]

    def advance(self, call: Call) -> list[_Seen]:
        """Take every pass to `call`."""
        found = []
        for one in self.passes:
            event = one.advance()
            if event is None or event[0] != call:
                raise CheckpointError(f"the models do not run their layers in the same order, from '{call.module}' on")
            found.append(_Seen(*event[1:]))
        return found

    def close(self) -> None:
        for one in self.passes:
            one.close()
        self._hooks.__exit__(None, None, None)


class _Fit:
    """The normal equations of one layer, summed over its calls, for the change of its weights since the average."""

    def __init__(self, stock: Stock, call: Call) -> None:
        self.columns = call.columns
        self.weight = stock.parameter[call.weight]
        self.bias: nn.Parameter | None = stock.parameter[call.bias] if call.bias else None
        self.total: Tensor | None = None
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None

    def extended(self, x: Tensor) -> Tensor:
        """The inputs with a 1 for the bias."""
        return x if self.bias is None else torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)

    def add(self, inputs: Tensor, lacking: Tensor, mask: Tensor | None) -> None:
        x, r = self.extended(inputs), lacking
        if mask is not None and x.shape[: mask.dim()] == mask.shape:
            x, r = x[mask.bool()], r[mask.bool()]
        x, r = x.reshape(-1, x.shape[-1]), r.reshape(-1, r.shape[-1])
        gram, cross = x.mT @ x, x.mT @ r
        if self.total is not None:  # an earlier call: ask for the whole change, not for what is left of it
            cross += gram @ self.total
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross

    def solve(self, ridge: float) -> Tensor:
        """Change the weights, and return by how much: (inputs, outputs)."""
        assert self.gram is not None and self.cross is not None
        total = ridge_solution(self.gram, self.cross, ridge)
        delta = total if self.total is None else total - self.total
        self.total = total
        rows = delta if self.bias is None else delta[:-1]
        self.weight.data.add_(rows.mT if self.columns else rows)
        if self.bias is not None:
            self.bias.data.add_(delta[-1])
        return delta


def ridge_solution(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(G + r diag(G))^-1 C, the minimum over T of |X T - R|^2 + r |diag(G)^1/2 T|^2 with G = X^T X, C = X^T R.

    gram: (n, n). cross: (n, m). Solved in float64. An input that is always zero gets no weight.
    """
    g, c = gram.double(), cross.double()
    diagonal = g.diagonal()
    floor = torch.finfo(torch.float32).eps * diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny)
    g = g + torch.diag(ridge * diagonal + floor * (diagonal < floor))
    return torch.cholesky_solve(c, torch.linalg.cholesky(g)).to(gram.dtype)
