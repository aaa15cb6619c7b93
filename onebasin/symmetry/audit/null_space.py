# SPDX-License-Identifier: Apache-2.0
"""Are a table's continuous symmetries all there are?

The directions in parameter space that leave all outputs unchanged to first order are the null space of the Jacobian
of outputs with respect to parameters. The signature generates some of them: the Lie algebra of every space's group,
and the gauge freedom that the canonical form removes. Where both have the same dimension the table is complete;
where the null space is larger a symmetry is missing, and where a generated direction changes an output one is wrong.

Norms must have no epsilon: with one, the scale of a stream is a symmetry only nearly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tables.signature import Signature
from ..tables.ties import separate, share, with_ties
from .special import Tangent, Tensors
from .tangents import SPAN, tangents


@dataclass(frozen=True)
class Audit:
    """Flat directions found and generated.

    rank, nullity: of the Jacobian; they add up to the number of parameters. gap: its smallest singular value that
    counts and its largest that does not, over the largest. dimension: of the span of all generated tangents.
    largest_change: of the outputs along a generated tangent of norm 1, over the largest singular value.
    """

    parameters: int
    rank: int
    nullity: int
    gap: tuple[float, float]
    dimension: int
    largest_change: float

    @property
    def complete(self) -> bool:
        return self.nullity == self.dimension and self.largest_change < 1e-9


def audit(
    signature: Signature, tensors: Tensors, outputs: Callable[[Tangent], Tensor], tolerance: float = 1e-12
) -> Audit:
    """Compare the null space of the Jacobian with the tangents that the signature generates.

    tensors: role -> float64 tensor at a generic point (every parameter random, no norm weight zero).
    outputs: from such tensors to a vector (m,), with more than enough entries to tell all parameters apart.
    tolerance: singular values below it, relative to the largest, count as zero.
    Raises ValueError where there are fewer outputs than parameters, or a norm weight is zero.
    """
    free = {role: tensors[role] for role, entry in signature.tensors.items() if entry.alias is None}
    aliases = {role: entry.alias for role, entry in signature.tensors.items() if entry.alias is not None}
    full = jacobian(lambda given: outputs({**given, **{role: given[a] for role, a in aliases.items()}}), free)
    sizes = full.norm(dim=0)  # a parameter's unit is free: columns of one size make the gap clear
    seen = sizes > tolerance * sizes.max()
    values = torch.linalg.svdvals(full * seen / torch.where(seen, sizes, 1.0))
    values = values / values[0]
    rank = int((values > tolerance).sum())
    basis = tied_span(signature, tensors)
    change = (full @ basis).norm(dim=0) / torch.linalg.matrix_norm(full, 2)
    beyond = float(values[rank]) if rank < len(values) else 0.0
    return Audit(full.shape[1], rank, full.shape[1] - rank, (float(values[rank - 1]), beyond),
                 basis.shape[1], float(change.max()) if len(change) else 0.0)  # fmt: skip


def jacobian(outputs: Callable[[Tangent], Tensor], tensors: Tensors, chunk: int = 128, spare: int = 50) -> Tensor:
    """G J with a random matrix G of a few more rows than there are parameters, which has the null space of J.

    In reverse mode, `chunk` rows at a time: (parameters + spare, parameters), parameters in the order of `tensors`.
    Raises ValueError where there are fewer outputs than that.
    """
    leaves = {role: tensor.detach().clone().requires_grad_() for role, tensor in tensors.items()}
    values = outputs(leaves).reshape(-1)
    count = sum(leaf.numel() for leaf in leaves.values())
    if len(values) < count:
        raise ValueError(f"{len(values)} outputs cannot tell {count} parameters apart; give more inputs")
    rows = []
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count + spare, chunk):
        some = torch.randn(min(chunk, count + spare - start), len(values), generator=generator, dtype=values.dtype)
        gradients = torch.autograd.grad(
            values, list(leaves.values()), some, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        flat = [
            leaf.new_zeros(len(some), leaf.numel()) if gradient is None else gradient.reshape(len(some), -1)
            for leaf, gradient in zip(leaves.values(), gradients, strict=True)
        ]
        rows.append(torch.cat(flat, dim=1))
    return torch.cat(rows)


def tied_span(signature: Signature, tensors: Tensors) -> Tensor:
    """Orthonormal basis of the generated tangents that keep tied tensors equal: (parameters, dimension).

    Tangents are generated with every tied tensor on its own, and a weight for norms that have none. Tying restricts a
    model to a subspace of parameters, as a weight of 1 does, and its flat directions are those of the freer model that
    lie in that subspace.
    """
    loose = separate(with_ties(signature))
    point = share(loose, dict(tensors))
    rows = []
    for tangent in tangents(loose, point):
        flat = torch.cat([tangent.get(role, torch.zeros_like(point[role])).reshape(-1) for role in loose.tensors])
        if float(flat.norm()) > SPAN:
            rows.append(flat / flat.norm())
    size = sum(point[role].numel() for role in loose.tensors)
    columns = torch.stack(rows, dim=1) if rows else torch.zeros(size, 0, dtype=torch.float64)
    span = orthonormal(columns)
    numbers, start = {}, 0
    for role in loose.tensors:
        numbers[role] = torch.arange(start, start + point[role].numel())
        start += point[role].numel()
    ties = {**signature.tensors, **signature.absent}
    equal = [(role, entry.alias) for role, entry in ties.items() if entry.alias is not None]
    fixed = [span[numbers[role]] for role, entry in ties.items() if "bare" in entry.notes]
    if equal or fixed:
        apart = torch.cat([span[numbers[role]] - span[numbers[other]] for role, other in equal] + fixed)
        _, values, vh = torch.linalg.svd(apart, full_matrices=True)
        span = span @ vh[int((values > SPAN).sum()) :].mT
    free = [role for role, entry in signature.tensors.items() if entry.alias is None]
    return orthonormal(torch.cat([span[numbers[role]] for role in free]))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns."""
    if not columns.numel():
        return columns[:, :0]
    u, values, _ = torch.linalg.svd(columns, full_matrices=False)
    basis: Tensor = u[:, values > SPAN * values.max()]
    return basis
