# SPDX-License-Identifier: Apache-2.0
"""The audit: does a table have all continuous symmetries?

The directions in parameter space that leave all outputs unchanged to first order are the null space of the Jacobian
of outputs with respect to parameters. The signature generates some of them: the Lie algebra of every space's group,
and the gauge freedom that the canonical form removes. If both have the same dimension, the table is complete; if the
null space is larger, a symmetry is missing; and if a generated direction changes an output, a symmetry is wrong.

Norms must have no epsilon: with one, the scale of a stream is only approximately a symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from ..tables.signature import Signature
from ..tables.ties import separate, share, with_ties
from .around_norms import around_norms
from .directions import SPAN, Tangent, Tensors, decomposed, singular
from .missing import NEAR, smallest_sets
from .tangents import tangents

WRONG = 1e-9  # a direction along which the outputs change by this much is not flat
STEPS = 50  # of power iteration
CHUNK, SPARE = 128, 50  # rows of the Jacobian: how many are computed at a time, and how many more than parameters
CLEAR = 100.0  # least ratio of the smallest singular value that counts and the largest that counts as zero
NOISE = 1e-13  # shift for singular values of zero, relative to the largest


Missing = tuple[tuple[str, ...], int]  # roles, and a number of directions


@dataclass(frozen=True)
class Audit:
    """Flat directions found and generated.

    parameters: those with respect to which some output has a gradient, unlike unused rows of a table, or parameters
    that only choose experts. rank, nullity: of the Jacobian; they add up to the number of parameters. gap: its smallest
    singular value that counts and its largest that does not, relative to the largest. dimension: of the span of all
    generated tangents that are flat. largest_change: of the outputs along a tangent of norm 1 that the signature
    states, relative to the largest singular value. find: what looks for `missing`.
    """

    parameters: int
    rank: int
    nullity: int
    gap: tuple[float, float]
    dimension: int
    largest_change: float
    find: Callable[[], Iterable[Missing]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def missing(self) -> tuple[Missing, ...]:
        """The smallest sets of tensors that hold flat directions that are not generated, and how many of them each
        holds beyond those of the sets before. It may take minutes to find them."""
        return tuple(self.find())

    @property
    def complete(self) -> bool:
        """Return whether no symmetry is missing or wrong. Without a clear gap, the nullity proves neither."""
        kept, lost = self.gap
        return self.nullity == self.dimension and self.largest_change < WRONG and kept > CLEAR * lost


def audit(
    signature: Signature, tensors: Tensors, outputs: Sequence[Callable[[Tangent], Tensor]], tolerance: float = 1e-12
) -> Audit:
    """Compare the null space of the Jacobian with the tangents that the signature generates.

    Args:
        signature: Of the model.
        tensors: Role -> float64 tensor at a generic point (every parameter random, no norm weight zero).
        outputs: Functions of such tensors that return vectors, together with more entries than there are parameters.
        tolerance: Singular values below it, relative to the largest, count as zero.

    Raises:
        ValueError: There are fewer outputs than parameters, some are not finite, or a norm weight is zero.
    """
    free = {role: tensors[role] for role, entry in signature.tensors.items() if entry.alias is None}
    aliases = {role: entry.alias for role, entry in signature.tensors.items() if entry.alias is not None}

    def whole(given: Tangent) -> Tangent:
        return {**given, **{role: given[alias] for role, alias in aliases.items()}}

    full = jacobian([lambda given, one=one: one(whole(given)) for one in outputs], free)  # type: ignore[misc]
    sizes = full.norm(dim=0)  # the unit of a parameter is arbitrary: columns of equal norm make the gap clear
    seen = sizes > 0
    largest = _largest(full)
    basis = tied_span(signature, tensors)
    change = (full @ basis).norm(dim=0) / largest
    if bool((change >= WRONG).any()):  # stated tangents have to be flat; of guessed ones, only the flat part counts
        basis = _flat(full, basis, largest)
        change = (full @ tied_span(signature, tensors, stated=True)).norm(dim=0) / largest
    basis = basis if seen.all() else orthonormal(basis[seen])
    small = sizes <= tolerance * sizes.max()  # noise: of a bias of keys, say
    units = torch.where(small, 1.0, sizes)[seen]
    values, vectors = smallest((full * ~small)[:, seen] / units, basis.shape[1], tolerance)
    zeros = int((values <= tolerance).sum())
    dimension = basis.shape[1]
    find: Callable[[], Iterable[Missing]] = tuple
    if zeros > dimension:
        basis = orthonormal(_flat(full, tied_span(signature, tensors, tried=True), largest)[seen])
        null = torch.linalg.qr(vectors[:, len(values) - zeros :] / units.unsqueeze(1)).Q
        idle = null.mT[:, small[seen]]  # no output depends on these (a router whose one weight is always 1)
        known = torch.cat([null.mT @ basis, idle, _explained(null, signature, free, seen)], dim=1)
        u, found, _ = decomposed(known)
        dimension = int((found > NEAR).sum())
        find = partial(smallest_sets, null, null @ u[:, :dimension], _places(free, seen))
    gap = float(values[-zeros - 1]), float(values[-zeros]) if zeros else 0.0
    return Audit(int(seen.sum()), int(seen.sum()) - zeros, zeros, gap,
                 dimension, float(change.max()) if len(change) else 0.0, find)  # fmt: skip


def _places(tensors: Tensors, seen: Tensor) -> dict[str, Tensor]:
    """Return where each tensor's parameters stand among those seen, without tensors that have none."""
    numbers = torch.split(torch.cumsum(seen, 0) - 1, [tensor.numel() for tensor in tensors.values()])
    used = torch.split(seen, [len(each) for each in numbers])
    return {role: places[here] for role, places, here in zip(tensors, numbers, used, strict=True) if here.any()}


def _flat(full: Tensor, columns: Tensor, largest: float) -> Tensor:
    """Return the part of a span along which the outputs do not change."""
    values, vh = singular(torch.linalg.qr(full @ columns, mode="r").R / largest)
    return columns @ vh[int((values >= WRONG).sum()) :].mT


def _explained(null: Tensor, signature: Signature, tensors: Tensors, seen: Tensor) -> Tensor:
    """Return the part of a null space, (parameters seen, n), that consists of the tensors' directions around norms, in
    terms of its n directions."""
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
    """Return about `count` of the smallest singular values of a matrix, relative to the largest, in descending order,
    and their right vectors: in any case all that are below the tolerance, and some that are not.

    Inverse iteration on the triangle R of R^T R = M^T M + mu^2 is several times faster than the full decomposition. All
    zeros have the same weight in it.
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
    """Estimate the largest singular value, from below, by power iteration."""
    vector = torch.ones(matrix.shape[1], dtype=matrix.dtype)
    for _ in range(STEPS):
        vector = matrix.mT @ (matrix @ (vector / vector.norm()))
    return float(vector.norm().sqrt())


def jacobian(outputs: Sequence[Callable[[Tangent], Tensor]], tensors: Tensors) -> Tensor:
    """Return G J with a random matrix G: it has the null space of J.

    Every row belongs to one of the functions, and there are `SPARE` or more rows beyond the number of parameters on
    which some output depends, so the columns of all others are zero. Parameters are in the order of `tensors`. Raises
    ValueError if there are fewer outputs than parameters, or if some output or gradient is not finite.
    """
    leaves = {role: tensor.detach().clone().requires_grad_() for role, tensor in tensors.items()}
    count = sum(leaf.numel() for leaf in leaves.values())
    generator = torch.Generator().manual_seed(0)
    values = [function(leaves).reshape(-1) for function in outputs]
    if (seen := sum(map(len, values))) < count:
        raise ValueError(f"{seen} outputs cannot distinguish {count} parameters; give more inputs")
    _finite("outputs", values)
    used = int(torch.cat([_gradients(each, leaves, 1, generator) for each in values]).any(dim=0).sum())
    share = -(-(used + SPARE) // len(outputs))
    found = [_gradients(each, leaves, min(share, len(each)), generator) for each in values]
    _finite("gradients", found)
    return torch.cat(found)


def _finite(what: str, found: Iterable[Tensor]) -> None:
    if not all(bool(each.isfinite().all()) for each in found):
        raise ValueError(f"some {what} are not finite at random parameters, so no direction can be called flat")


def _gradients(values: Tensor, leaves: Tensors, count: int, generator: torch.Generator) -> Tensor:
    """Return gradients of random combinations of outputs, (count, parameters), in reverse mode, `CHUNK` at a time."""
    rows = []
    for start in range(0, count, CHUNK):
        some = torch.randn(min(CHUNK, count - start), len(values), generator=generator, dtype=values.dtype)
        gradients = torch.autograd.grad(
            values, list(leaves.values()), some, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        flat = [
            leaf.new_zeros(len(some), leaf.numel()) if gradient is None else gradient.reshape(len(some), -1)
            for leaf, gradient in zip(leaves.values(), gradients, strict=True)
        ]
        rows.append(torch.cat(flat, dim=1))
    return torch.cat(rows)


def tied_span(signature: Signature, tensors: Tensors, stated: bool = False, tried: bool = False) -> Tensor:
    """Return an orthonormal basis of the generated tangents that keep tied tensors equal: (parameters, dimension).

    Tangents are generated with all tied tensors separate, and with a weight for norms that have none. Tying restricts
    a model to a subspace of parameters, as a weight of 1 does, and its flat directions are those of the freer model in
    that subspace. stated, tried: see `tangents`.
    """
    loose = separate(with_ties(signature))
    point = share(loose, dict(tensors))
    rows = []
    for tangent in tangents(loose, point, stated, tried):
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
    kept = torch.cat([span[numbers[role]] for role in free])
    return orthonormal(kept) if len(kept) < len(span) else kept


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of some columns."""
    if not columns.numel():
        return columns[:, :0]
    u, values, _ = decomposed(columns)
    basis: Tensor = u[:, values > SPAN * values.max()]
    return basis
