# SPDX-License-Identifier: Apache-2.0
"""Are a table's continuous symmetries all there are?

The directions in parameter space that leave all outputs unchanged to first order are the null space of the Jacobian
of outputs with respect to parameters. The signature generates some of them: the Lie algebra of every space's group,
and the gauge freedom that the canonical form removes. Where both have the same dimension the table is complete;
where the null space is larger a symmetry is missing, and where a generated direction changes an output one is wrong.

Norms must have no epsilon: with one, the scale of a stream is a symmetry only nearly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tables.signature import Signature
from ..tables.ties import separate, share, with_ties
from .around_norms import around_norms
from .directions import SPAN, Tangent, Tensors, decomposed, singular
from .tangents import tangents

WRONG = 1e-9  # change of the outputs along a tangent, from which on it is none
STEPS = 50  # of power iteration
CLEAR = 100.0  # times as large as the largest singular value that counts as zero is the smallest that does not
NEAR = 1e-6  # of null vectors, which are as exact as the gap is wide
NOISE = 1e-13  # what zeros among singular values are taken for, over the largest


@dataclass(frozen=True)
class Audit:
    """Flat directions found and generated.

    parameters: without those that no output has a gradient by, such as rows of a table that nothing looks up, or what
    only decides which experts are taken. rank, nullity: of the Jacobian; they add up to the number of parameters. gap:
    its smallest singular value that counts and its largest that does not, over the largest. dimension: of the span of
    all generated tangents that are flat. largest_change: of the outputs along a tangent of norm 1 that the signature
    states, over the largest singular value.
    """

    parameters: int
    rank: int
    nullity: int
    gap: tuple[float, float]
    dimension: int
    largest_change: float

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and nothing wrong; a nullity that the tolerance alone decides proves neither."""
        kept, lost = self.gap
        return self.nullity == self.dimension and self.largest_change < WRONG and kept > CLEAR * lost


def audit(
    signature: Signature, tensors: Tensors, outputs: Sequence[Callable[[Tangent], Tensor]], tolerance: float = 1e-12
) -> Audit:
    """Compare the null space of the Jacobian with the tangents that the signature generates.

    tensors: role -> float64 tensor at a generic point (every parameter random, no norm weight zero).
    outputs: functions of such tensors that return vectors, with more than enough entries together to tell all
    parameters apart. tolerance: singular values below it, relative to the largest, count as zero.
    Raises ValueError where there are fewer outputs than parameters, or a norm weight is zero.
    """
    free = {role: tensors[role] for role, entry in signature.tensors.items() if entry.alias is None}
    aliases = {role: entry.alias for role, entry in signature.tensors.items() if entry.alias is not None}

    def whole(given: Tangent) -> Tangent:
        return {**given, **{role: given[alias] for role, alias in aliases.items()}}

    full = jacobian([lambda given, one=one: one(whole(given)) for one in outputs], free)  # type: ignore[misc]
    sizes = full.norm(dim=0)  # a parameter's unit is free: columns of one size make the gap clear
    seen = sizes > 0
    largest = _largest(full)
    basis = tied_span(signature, tensors)
    change = (full @ basis).norm(dim=0) / largest
    if bool((change >= WRONG).any()):  # what was guessed counts as far as it is flat, what is stated has to be
        basis = _flat(full, basis, largest)
        change = (full @ tied_span(signature, tensors, stated=True)).norm(dim=0) / largest
    basis = orthonormal(basis[seen])
    small = sizes <= tolerance * sizes.max()  # noise: of a bias of keys, say
    units = torch.where(small, 1.0, sizes)[seen]
    values, vectors = smallest((full * ~small)[:, seen] / units, basis.shape[1], tolerance)
    zeros = int((values <= tolerance).sum())
    dimension = basis.shape[1]
    if zeros > dimension:
        null = torch.linalg.qr(vectors[:, len(values) - zeros :] / units.unsqueeze(1)).Q
        known = torch.cat([null.mT @ basis, _explained(null, signature, free, seen)], dim=1)
        dimension = int((torch.linalg.svdvals(known) > NEAR).sum())
    gap = float(values[-zeros - 1]), float(values[-zeros]) if zeros else 0.0
    return Audit(int(seen.sum()), int(seen.sum()) - zeros, zeros, gap,
                 dimension, float(change.max()) if len(change) else 0.0)  # fmt: skip


def _flat(full: Tensor, columns: Tensor, largest: float) -> Tensor:
    """The part of a span along which the outputs stay."""
    values, vh = singular(torch.linalg.qr(full @ columns, mode="r").R / largest)
    return columns @ vh[int((values >= WRONG).sum()) :].mT


def _explained(null: Tensor, signature: Signature, tensors: Tensors, seen: Tensor) -> Tensor:
    """The part of a null space, (parameters seen, n), that is made of what each tensor may give beside norms: in terms
    of its n directions."""
    rest, start, signature = null.clone(), 0, with_ties(signature)
    places = torch.cumsum(seen, 0) - 1
    for role, tensor in tensors.items():
        here = slice(start, start := start + tensor.numel())
        given = around_norms(signature, tensors, role).reshape(-1, tensor.numel()).mT[seen[here]]
        rows = places[here][seen[here]]
        basis = orthonormal(given)
        rest[rows] -= basis @ (basis.mT @ rest[rows])
    values, vh = singular(torch.linalg.qr(rest, mode="r").R)
    return vh[int((values >= NEAR).sum()) :].mT


def smallest(matrix: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The smallest singular values of a matrix, over the largest, in descending order, and their right vectors: about
    so many, or as many more as are below the tolerance, and some that are not.

    By inverse iteration on the triangle R of R^T R = M^T M + mu^2, which is several times faster than all of them: all
    that are zero then count alike.
    """
    largest, total = _largest(matrix), matrix.shape[1]
    shift = NOISE * largest * torch.eye(total, dtype=matrix.dtype)
    triangle = torch.linalg.qr(torch.cat([matrix, shift]), mode="r").R
    generator = torch.Generator().manual_seed(0)
    size = count + 32
    while 2 * size < total:
        found = torch.randn(total, size, generator=generator, dtype=matrix.dtype)
        for _ in range(2):
            found = torch.linalg.solve_triangular(triangle.mT, torch.linalg.qr(found).Q, upper=False)
            found = torch.linalg.solve_triangular(triangle, torch.linalg.qr(found).Q, upper=True)
        found = torch.linalg.qr(found).Q
        values, vh = singular(torch.linalg.qr(matrix @ found, mode="r").R / largest)
        if values[0] > tolerance:
            return values, found @ vh.mT
        size *= 2
    values, vh = singular(torch.linalg.qr(matrix, mode="r").R / largest)
    return values, vh.mT


def _largest(matrix: Tensor) -> float:
    """The largest singular value, by power iteration: from below."""
    vector = torch.ones(matrix.shape[1], dtype=matrix.dtype)
    for _ in range(STEPS):
        vector = matrix.mT @ (matrix @ (vector / vector.norm()))
    return float(vector.norm().sqrt())


def jacobian(
    outputs: Sequence[Callable[[Tangent], Tensor]], tensors: Tensors, chunk: int = 128, spare: int = 50
) -> Tensor:
    """G J with a random matrix G of a few more rows than there are parameters, which has the null space of J.

    Every row is of one of the functions. In reverse mode, `chunk` rows at a time: (parameters + spare or more,
    parameters), parameters in the order of `tensors`. Raises ValueError where there are fewer outputs than that.
    """
    leaves = {role: tensor.detach().clone().requires_grad_() for role, tensor in tensors.items()}
    count = sum(leaf.numel() for leaf in leaves.values())
    generator = torch.Generator().manual_seed(0)
    rows, seen = [], 0
    for function in outputs:
        values = function(leaves).reshape(-1)
        seen += len(values)
        share = min(-(-(count + spare) // len(outputs)), len(values))
        for start in range(0, share, chunk):
            some = torch.randn(min(chunk, share - start), len(values), generator=generator, dtype=values.dtype)
            gradients = torch.autograd.grad(
                values, list(leaves.values()), some, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            flat = [
                leaf.new_zeros(len(some), leaf.numel()) if gradient is None else gradient.reshape(len(some), -1)
                for leaf, gradient in zip(leaves.values(), gradients, strict=True)
            ]
            rows.append(torch.cat(flat, dim=1))
    if seen < count:
        raise ValueError(f"{seen} outputs cannot tell {count} parameters apart; give more inputs")
    return torch.cat(rows)


def tied_span(signature: Signature, tensors: Tensors, stated: bool = False) -> Tensor:
    """Orthonormal basis of the generated tangents that keep tied tensors equal: (parameters, dimension).

    Tangents are generated with every tied tensor on its own, and a weight for norms that have none. Tying restricts a
    model to a subspace of parameters, as a weight of 1 does, and its flat directions are those of the freer model that
    lie in that subspace. stated: see `tangents`.
    """
    loose = separate(with_ties(signature))
    point = share(loose, dict(tensors))
    rows = []
    for tangent in tangents(loose, point, stated):
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
        values, vh = singular(apart)
        span = span @ vh[int((values > SPAN).sum()) :].mT
    free = [role for role, entry in signature.tensors.items() if entry.alias is None]
    return orthonormal(torch.cat([span[numbers[role]] for role in free]))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span of some columns."""
    if not columns.numel():
        return columns[:, :0]
    u, values, _ = decomposed(columns)
    basis: Tensor = u[:, values > SPAN * values.max()]
    return basis
