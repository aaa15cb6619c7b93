# SPDX-License-Identifier: Apache-2.0
"""Progressive merging: the merged model's linear layers are fitted one after another, in closed form.

Start from the plain average of aligned models. In the order of execution, let X be the inputs of a layer in the
*merged* model as it is by now, W its averaged weights (a bias is one more input, always 1), R what its output lacks:

    R = sum_j w_j Y_j - Y        Y: the layer's output; for layers that write the residual stream, the stream after it
    W <- W + (X^T X + r D)^-1 X^T R        D = diag(X^T X)

the least-squares solution with a ridge r towards the average. Each layer takes the ridge that leaves the least |R|^2
on calibration data that are held back: they walk along, but enter no sum. Because X comes from the merged model and R
compares with the stream rather than with the layer's own output, each layer also repairs what earlier ones left wrong.
With all weight on one model, or with equal models, R is zero and nothing changes.

RegMean (Jin et al., 2023, Eq. 2) solves the same kind of problem with the inputs of the models that are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
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

RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
AVERAGE, FITTED = "average", "progressive"  # what is compared at the end


@dataclass(frozen=True)
class Progressive:
    """tensors: role -> merged tensor. fitted: False where the plain average was better in the end.

    ridges: module -> the ridge that its layer took, None where it kept its average. losses: of the plain average and of
    the fitted model on held-back data, empty where there was nothing to choose. skipped: linear layers that keep their
    average, because the models do not share them or they are tied.
    """

    tensors: dict[str, Tensor]
    fitted: bool
    ridges: dict[str, float | None] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
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
    of which each layer takes its best on `held_back` (default: a sixteenth of the batches, at least one, which then fit
    nothing). With several the plain average is kept where it predicts better than the fitted model there: by the KL
    divergence from the mixture of the models' predictions; without logits, by squared distance from their mean output.

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
    calls = linear_calls(student, {key: value[:2] for key, value in fit[0].items()})
    answers = Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in teachers])

    def held_back_loss() -> float:
        shares = [weight / sum(weights) for weight in weights]
        return mean_loss(divergence, partial(forward_of(student), student.parameter), answers, shares, held)

    losses = {AVERAGE: held_back_loss()} if held else {}
    fitted = [call for call in calls if call.weight in shared and not student.shared(call.weight)]
    chosen = fit_layers(teachers, student, weights, ridges, fitted, fit, held, tell)
    skipped = [call.weight for call in calls if call not in fitted]
    if held:
        losses[FITTED] = held_back_loss()
    better = not held or losses[FITTED] < losses[AVERAGE]
    if better:
        average.update({role: tensor.detach() for role, tensor in student.parameter.items()})
    return Progressive(average, better, chosen, losses, skipped)


# --- the fit ----------------------------------------------------------------------------------------------------


def fit_layers(
    teachers: Sequence[Stock],
    student: Stock,
    weights: Sequence[float],
    ridges: Sequence[float],
    calls: Sequence[Call],
    batches: Sequence[Batch],
    held_back: Sequence[Batch] = (),
    tell: Callable[[str], None] | None = None,
) -> dict[str, float | None]:
    """Walk teachers and student through all batches together, fit each layer of the student on the way, and return the
    ridge that each took: the only one, or that with the least squared error on `held_back` (None: no change is best).

    A layer that is called several times in one pass is fitted at each call to all calls so far.
    """
    all_batches = [*batches, *held_back]
    walks = [_Walk(stock, calls, all_batches) for stock in (*teachers, student)]
    masks = [batch.get("attention_mask") for batch in all_batches]
    sums: dict[str, tuple[_Sums, _Sums]] = {}
    chosen: dict[str, float | None] = {}
    try:
        for number, call in enumerate(calls, 1):
            if tell:
                tell(f"fitting layer {number} of {len(calls)}: {call.module}")
            *theirs, mine = [walk.advance(call) for walk in walks]
            layer = _Layer(student, call)
            fit, held = sums.setdefault(call.module, (_Sums(layer), _Sums(layer)))
            for b, here in enumerate(mine):
                lacking = -here.value
                for weight, seen in zip(weights, theirs, strict=True):
                    lacking += weight * seen[b].value
                (fit if b < len(batches) else held).add(layer.extended(here.inputs), lacking, masks[b])
            before = fit.total
            best: float | None = None
            error = held.error(before) if held_back else 0.0
            for ridge in ridges:
                change = ridge_solution(fit.gram, fit.cross, ridge)
                if not held_back or held.error(change) < error:
                    best, error = ridge, held.error(change)
                    fit.total = held.total = change
            chosen[call.module] = best
            layer.change(fit.total - before)
            for here in mine:
                here.value.add_(layer.extended(here.inputs) @ (fit.total - before))
    finally:
        for walk in walks:
            walk.close()
    return chosen


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


class _Layer:
    """A linear layer as one matrix: its weight, (inputs, outputs), above its bias."""

    def __init__(self, stock: Stock, call: Call) -> None:
        self.columns = call.columns
        self.weight = stock.parameter[call.weight]
        self.bias: nn.Parameter | None = stock.parameter[call.bias] if call.bias else None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape if self.columns else self.weight.mT.shape
        return inputs + (self.bias is not None), outputs

    def extended(self, x: Tensor) -> Tensor:
        """The inputs with a 1 for the bias."""
        return x if self.bias is None else torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)

    def change(self, delta: Tensor) -> None:
        rows = delta if self.bias is None else delta[:-1]
        self.weight.data.add_(rows.mT if self.columns else rows)
        if self.bias is not None:
            self.bias.data.add_(delta[-1])


class _Sums:
    """gram: X^T X. cross: X^T R for the whole change of a layer since the average, of which `total` is made already."""

    def __init__(self, layer: _Layer) -> None:
        inputs, outputs = layer.shape
        self.gram = layer.weight.new_zeros(inputs, inputs)
        self.cross = layer.weight.new_zeros(inputs, outputs)
        self.total = layer.weight.new_zeros(inputs, outputs)

    def add(self, x: Tensor, lacking: Tensor, mask: Tensor | None) -> None:
        if mask is not None and x.shape[: mask.dim()] == mask.shape:
            x, lacking = x[mask.bool()], lacking[mask.bool()]
        x, lacking = x.reshape(-1, x.shape[-1]), lacking.reshape(-1, lacking.shape[-1])
        gram = x.mT @ x
        self.gram += gram
        self.cross += x.mT @ lacking
        if bool(self.total.any()):  # an earlier call made this part: ask for the whole change
            self.cross += gram @ self.total

    def error(self, change: Tensor) -> float:
        """|X T - R|^2 up to a constant."""
        return float(((self.gram @ change - 2 * self.cross) * change).sum(dtype=torch.float64))


def ridge_solution(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(G + r diag(G))^-1 C, the minimum over T of |X T - R|^2 + r |diag(G)^1/2 T|^2 with G = X^T X, C = X^T R.

    gram: (n, n). cross: (n, m). Solved in float64. An input that is always zero gets no weight.
    """
    g, c = gram.double(), cross.double()
    diagonal = g.diagonal()
    floor = torch.finfo(torch.float32).eps * diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny)
    g = g + torch.diag(ridge * diagonal + floor * (diagonal < floor))
    return torch.cholesky_solve(c, torch.linalg.cholesky(g)).to(gram.dtype)
