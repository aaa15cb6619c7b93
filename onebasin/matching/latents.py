# SPDX-License-Identifier: Apache-2.0
"""Free numbers that stand for elements of groups near the identity, so that gradients can reach them.

    orthogonal           expm(A - A^T); in the complement of 1 where ones are fixed; times e^s where scales are allowed
    rotary               e^(s + i phi) per pair
    invertible           1 + Z, with the inverse transpose for what reads
    scales of neurons    e^s
    permutations         stay (`fixed`); or the assignment of scores Z, with signs where signs act, whose gradient goes
                         to Z as if the permutation were Z itself (`straight-through`); or, for neurons, Sinkhorn's
                         limit of Z (`sinkhorn`), a doubly stochastic matrix: a relaxation, no symmetry
    permuted and scaled  diag(e^s) P for what writes, diag(e^-s) P for what reads

Every map but the assignment is smooth, with finite derivatives everywhere: no singular values are divided by. Straight
through: Bengio et al., 2013; for permutations Ainsworth et al., 2023, section 3.3. Sinkhorn: Cuturi, 2013.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.alignment import move
from onebasin.symmetry.coupling import Coupling, sinkhorn
from onebasin.symmetry.groups import (
    Factors,
    Invertible,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    Rotary,
    ScaledOrthogonal,
    ScaledPermutation,
    SignedPermutation,
)
from onebasin.symmetry.groups.elements import Acts, Element, Linear, Monomial
from onebasin.symmetry.groups.orthogonal import complement_of_ones
from onebasin.symmetry.groups.signs import diagonal, pairs

Latent = Mapping[str, Tensor]  # the free numbers of one element, by name

PERMUTATIONS = ("fixed", "straight-through", "sinkhorn")
MARGIN = 0.5  # by which the scores of a permutation prefer the identity at first
MIXED = 0.1  # share of every neuron that a coupling spreads evenly over all at first


def zeros(
    signature: Signature, groups: Mapping[str, Group], like: Tensor, permutations: str = "fixed"
) -> dict[str, Latent]:
    """Root space -> the free numbers of the identity (of a coupling near it, where neurons are relaxed).

    permutations: one of `PERMUTATIONS`; signs alone have no numbers. like: dtype and device.
    """
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
        latent = {name: like.new_zeros(shape) for name, shape in shapes.items()}
        if isinstance(group, (Permutation, ScaledPermutation, SignedPermutation)):
            eye = torch.eye(n).to(like)
            if permutations == "straight-through":
                latent["order"] = (MARGIN * eye).expand(*batch, n, n).clone()
            elif permutations == "sinkhorn" and space.part == "ffn" and not batch:
                latent["mixture"] = ((1 - MIXED) * eye + MIXED / n).log()
        if latent:
            found[root] = {name: numbers.requires_grad_() for name, numbers in latent.items()}
    return found


def blend(
    signature: Signature,
    anchor: Mapping[str, Tensor],
    sources: Sequence[Mapping[str, Tensor]],
    elements: Sequence[Mapping[str, Acts]],
    shares: Sequence[float],
) -> dict[str, Tensor]:
    """shares[0] A + sum_j shares[j] e_j(B_j), differentiable in what the elements e_j were made of."""
    total = {role: shares[0] * tensor for role, tensor in anchor.items()}
    for share, tensors, moving in zip(shares[1:], sources, elements, strict=True):
        for role, tensor in tensors.items():
            total[role] = total[role] + share * move(signature, moving, role, tensor)
    return total


def element_of(group: Group, latent: Latent) -> Acts:
    """What free numbers stand for. Differentiable."""
    if "order" in latent or "mixture" in latent:
        mixed = sinkhorn(latent["mixture"]).exp() if "mixture" in latent else _straight_through(group, latent["order"])
        if "stretch" not in latent:
            return Coupling(mixed)
        scale = latent["stretch"].exp().unsqueeze(-1)
        return Coupling(scale * mixed, mixed / scale)
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


def _straight_through(group: Group, score: Tensor) -> Tensor:
    """The permutation (with signs) of greatest score, whose gradient is that of the score."""
    return _ordered(group, score).dense(score.dtype).matrix + score - score.detach()


def _ordered(group: Group, score: Tensor) -> Monomial:
    kind = SignedPermutation() if isinstance(group, SignedPermutation) else Permutation()
    return kind.nearest(_like(score.detach()))


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


# --- what comes out -----------------------------------------------------------------------------------------------


@torch.no_grad()
def finished(
    signature: Signature, groups: Mapping[str, Group], start: Alignment, latents: Mapping[str, Latent]
) -> tuple[Alignment, dict[str, Coupling]]:
    """What the numbers stand for, after `start`, in float64 and with the rounding of either taken off; and the
    couplings that come after that, where neurons were relaxed."""
    elements: dict[str, Element] = {}
    couplings: dict[str, Coupling] = {}
    for root, latent in latents.items():
        if "order" in latent:
            scale = diagonal(latent["stretch"].double().exp()) if "stretch" in latent else None
            order = _ordered(groups[root], latent["order"])
            elements[root] = order if scale is None else scale.after(order)
            continue
        found = element_of(groups[root], {name: numbers.double() for name, numbers in latent.items()})
        if isinstance(found, Coupling):
            couplings[root] = found
        elif isinstance(found, (Linear, Monomial)):
            elements[root] = found
    factor = Alignment(elements, {root: signature.spaces[root].batch for root in elements})
    batch = {**{root: signature.spaces[root].batch for root in start}, **start.batch}
    whole = factor.after(Alignment({root: _in_double(element) for root, element in start.elements.items()}, batch))
    exact = {root: _exact(groups[root], whole.elements[root]) for root in factor}
    return Alignment({**whole.elements, **exact}, whole.batch), couplings


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
