# SPDX-License-Identifier: Apache-2.0
"""RegMean: linear layers whose outputs are closest to those of all models, each on the inputs that it sees.

    min_W sum_i w_i tr (W - W_i)^T G_i (W - W_i),     W = (sum_i w_i G_i)^-1 sum_i w_i G_i W_i

with W (inputs, outputs), G_i the mean of x x^T over the layer's inputs x in model i, and off-diagonal entries of G_i
multiplied by `shrink` (Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023, Eqs. 1
and 2, and section 4). As there, all but the weights of linear layers is averaged, including biases; so is a weight that
several modules share (a tied output head). A convolution is a linear layer over its patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, unfold
from torch.overrides import TorchFunctionMode

from onebasin.data.calibration import Data
from onebasin.engine import Means, Tell
from onebasin.models import Model
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch, examples, examples_in, hooks, linear_layers, run, samples
from onebasin.settings import Factor, check_fields, setting
from onebasin.symmetry import Entry, Signature

from .average import average
from .examples import alike, unpadded
from .method import Merged, Sources
from .statistics import Statistics, StatisticsMethod, measured
from .tensors import merged_tensors

SHRINK = 0.9
TOGETHER = 32  # examples of one length that run at once
JITTERS = (1e-10, 1e-8, 1e-6, 1e-4)  # of the mean diagonal; the first with which the sum is positive definite


@dataclass(frozen=True)
class RegMean(StatisticsMethod):
    """Linear layers by regression on their inputs in each model; all else is averaged."""

    kind: ClassVar[str] = "gram"

    shrink: Factor = setting(SHRINK, "Factor on the off-diagonal entries of the Gram matrices.")

    def measure(self, model: Model, data: Data, means: Means, tell: Tell | None) -> Statistics:
        stock = loaded_model(model, dtype=means.dtype, device=means.device)
        grams, columns, count = input_grams(stock, data.batches, tell=tell)
        return measured(self.kind, grams, count, columns, model)

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        found = self.of_sources(sources, data, means, tell)
        columns = frozenset().union(*(one.columns for one in found))
        solve = Regression([one.tensors for one in found], columns, self.shrink)
        return Merged(merged_tensors(sources, solve, replace(means, ray=None)), {"jitter": solve.jitter})


# --- measuring --------------------------------------------------------------------------------------------------


def input_grams(
    stock: LoadedModel, batches: Sequence[Batch], *, tell: Tell | None = None
) -> tuple[dict[str, Tensor], frozenset[str], int]:
    """Return Gram matrices of the inputs of all linear layers, summed batch by batch.

    Padding is left out where there is an attention_mask.

    Returns:
        Role of the weight -> mean of x x^T over all inputs, (n, n) float64, or (experts, n, n) for experts, where
        tokens that are not sent to an expert count as zeros; the roles whose weight is stored as (outputs, inputs); and
        the number of examples.

    Raises:
        ValueError: There are no batches, or only padding.
    """
    if not batches:
        raise ValueError("Gram matrices need at least one batch of data")
    masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
    if any(not bool(mask.flatten(1).any(1).all()) for mask in masks):
        raise ValueError("an example consists of padding alone; leave it out")
    given = sum(map(examples_in, batches))
    if stock.parts:  # the rows sent to an expert do not tell whether they were padding
        batches = list(alike([example for batch in batches for example in unpadded(batch)], TOGETHER))
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: Tensor | None = None

    def look(role: str, module: nn.Module) -> Callable[[Tensor, Tensor], None]:
        def add(x: Tensor, _: Tensor) -> None:
            rows = _patches(module, x) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else x
            rows = samples(rows, mask)
            gram = (rows.mT @ rows).double()
            sums[role] = sums[role] + gram if role in sums else gram
            counts[role] = counts.get(role, 0) + len(rows)

        return add

    calls = linear_layers(stock, examples(batches[0], 0, 2))
    calls = [call for call in calls if not stock.shared(call.weight)]
    convolutions = _convolutions(stock)
    watched = {call.module: call.weight for call in calls} | convolutions
    grams = ExpertGrams(stock)
    tokens = 0
    looks = {name: look(role, stock.model.get_submodule(name)) for name, role in watched.items()}
    with hooks(stock, looks), expert_inputs(stock, grams.add):
        for number, batch in enumerate(batches, 1):
            if tell:
                tell(f"Gram matrices: batch {number} of {len(batches)}")
            mask = batch.get("attention_mask")
            tokens += batch["input_ids"].numel() if grams.counts else 0
            run(stock, batch)
    columns = {call.weight for call in calls if call.columns} | set(convolutions.values())
    means = {role: sums[role] / counts[role] for role in sums}
    means |= {role: total / tokens for role, total in grams.sums.items()}
    return means, frozenset((columns | grams.sums.keys()) & means.keys()), given


class expert_inputs(TorchFunctionMode):
    """Call `look(role, expert, rows)` with the inputs of every expert matrix that is multiplied in the block.

    A product is recognised by the memory of its matrix, which may hold several roles (gate and up projection).
    """

    def __init__(self, stock: LoadedModel, look: Callable[[str, int, Tensor], None]) -> None:
        super().__init__()
        self.look = look
        self.held: dict[int, list[tuple[int, str, int]]] = {}
        for role, parts in stock.parts.items():
            for expert, part in enumerate(parts):
                place = part.of(stock.model)
                within = self.held.setdefault(place.untyped_storage().data_ptr(), [])
                within.append((int(place.storage_offset()), role, expert))

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear and self.held:
            rows, weight = args[:2]
            first = weight.storage_offset()
            for place, role, expert in self.held.get(weight.untyped_storage().data_ptr(), []):
                if first <= place < first + weight.numel():
                    self.look(role, expert, rows.detach().reshape(-1, rows.shape[-1]))
        return func(*args, **(kwargs or {}))


class ExpertGrams:
    """Sums of x x^T over the inputs of each expert: role -> (experts, n, n) float64."""

    def __init__(self, stock: LoadedModel) -> None:
        self.counts = {role: len(parts) for role, parts in stock.parts.items()}
        self.sums: dict[str, Tensor] = {}

    def add(self, role: str, expert: int, rows: Tensor) -> None:
        n = rows.shape[-1]
        if role not in self.sums:
            self.sums[role] = rows.new_zeros((self.counts[role], n, n), dtype=torch.float64)
        self.sums[role][expert] += (rows.mT @ rows).double()


def _convolutions(stock: LoadedModel) -> dict[str, str]:
    """Return module -> role of the weight, for convolutions that are linear layers over patches."""
    found = {}
    for role, name in stock.owner.items():
        module = stock.module(role)
        plain = isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups == 1 and module.padding_mode == "zeros"
        if plain and stock.parameter[role] is module.weight and not isinstance(module.padding, str):
            found[name] = role
    return found


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches that the kernel sees: (batch, channels, *size) -> (batch, patches, channels * kernel)."""
    flat = isinstance(module, nn.Conv1d)
    image = x.unsqueeze(2) if flat else x

    def pair(value: tuple[int, ...], other: int) -> tuple[int, ...]:
        return (other, *value) if flat else tuple(value)

    padding = pair(tuple(map(int, module.padding)), 0)
    kernel, stride, dilation = pair(module.kernel_size, 1), pair(module.stride, 1), pair(module.dilation, 1)
    return unfold(image, kernel, dilation, padding, stride).mT


# --- merging ----------------------------------------------------------------------------------------------------


@dataclass
class Regression:
    """A way to combine aligned tensors: linear layers by regression, everything else averaged.

    grams: one for every model, role -> (n, n), aligned as the models are. columns: roles stored as (outputs, inputs).
    jitter: role -> the addition to the diagonal, relative to its mean; filled in as layers are solved.
    """

    grams: Sequence[Mapping[str, Tensor]]
    columns: frozenset[str]
    shrink: Factor = SHRINK
    jitter: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        """Raises ValueError for weights that are negative or all zero."""
        if min(weights) < 0 or not sum(weights) > 0:
            raise ValueError("RegMean needs weights that are not negative, and not all zero")
        role = entry.role
        if not all(role in gram for gram in self.grams):
            return average(tensors, weights, signature, entry)
        if entry.pieces:
            return self._experts(tensors, weights, entry)
        columns = role in self.columns
        matrices = [t.flatten(1).mT if columns else t.flatten(0, -2) for t in tensors]
        grams = [gram[role].to(tensors[0].device) for gram in self.grams]
        solved, self.jitter[role] = regression_mean(grams, matrices, weights, self.shrink)
        return (solved.mT if columns else solved).reshape(tensors[0].shape).to(tensors[0].dtype)

    def _experts(self, tensors: list[Tensor], weights: Sequence[float], entry: Entry) -> Tensor:
        """Solve every expert by itself; the jitter is the largest of all."""
        pieces = [[piece for _, piece in entry.split(tensor)] for tensor in tensors]
        solved, jitters = [], []
        for expert, matrices in enumerate(zip(*pieces, strict=True)):
            grams = [gram[entry.role][expert].to(tensors[0].device) for gram in self.grams]
            found, jitter = regression_mean(grams, [matrix.mT for matrix in matrices], weights, self.shrink)
            solved.append(found.mT)
            jitters.append(jitter)
        self.jitter[entry.role] = max(jitters)
        return torch.cat(solved, entry.joint).to(tensors[0].dtype)


def regression_mean(
    grams: Sequence[Tensor], matrices: Sequence[Tensor], weights: Sequence[float], shrink: float = SHRINK
) -> tuple[Tensor, float]:
    """Return the minimiser of sum_i w_i tr (W - W_i)^T H_i (W - W_i), and the jitter j that it took.

    H_i is G_i with its off-diagonal entries times `shrink`, plus j times the mean of the diagonals, so that an input
    that never occurs keeps its average weights. Solved by Cholesky in float64; j is the least of `JITTERS` for which
    that succeeds.

    grams: G_i, (n, n). matrices: W_i, (n, outputs). shrink: from 0 to 1.
    """
    shares = [weight / sum(weights) for weight in weights]
    mixed = [w * (shrink * g + (1 - shrink) * torch.diag(g.diagonal())) for w, g in zip(shares, grams, strict=True)]
    total = torch.stack(mixed).sum(0).double()
    right = torch.stack([h.double() @ m.double() for h, m in zip(mixed, matrices, strict=True)]).sum(0)
    mean = torch.stack([w * m.double() for w, m in zip(shares, matrices, strict=True)]).sum(0)
    scale = float(total.diagonal().mean()) or 1.0
    for jitter in JITTERS:
        floor = jitter * scale
        factor, failed = torch.linalg.cholesky_ex(total + floor * torch.eye(len(total)).to(total))
        if not int(failed):
            return torch.cholesky_solve(right + floor * mean, factor), jitter
    raise ValueError("the Gram matrices of a linear layer are not positive: they hold NaN, or were not measured so")
