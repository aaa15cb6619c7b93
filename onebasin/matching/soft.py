# SPDX-License-Identifier: Apache-2.0
"""Soft couplings of neurons, after matching: semi-permutations in place of the identity that matching left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from onebasin.symmetry import Group, Signature
from onebasin.symmetry.coupling import Coupling, soften

from .moments import cross_moments

Read = Callable[[str], tuple[Tensor, Tensor]]  # role -> (anchor, matched source)


def soft_couplings(
    signature: Signature, read: Read, groups: Mapping[str, Group], temperature: float
) -> dict[str, Coupling]:
    """A coupling for every FFN space in `groups`, from the same cross-moments as its permutation.

    read: gives the source as it stands after matching, so that the coupling tends to the identity with the
    temperature. Heads keep their permutation: what two heads compute adds up under different attention weights, so a
    mixture of their value-output circuits is no head of an ordinary model. Raises ValueError as `soften` does.
    """
    found = {}
    for root in groups:
        if signature.spaces[root].part == "ffn" and not signature.spaces[root].batch:
            pairs = [(role, *read(role), 1.0) for role in signature.touching[root]]
            found[root] = soften(cross_moments(signature, root, pairs).total, temperature)
    return found
