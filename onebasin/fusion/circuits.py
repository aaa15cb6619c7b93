# SPDX-License-Identifier: Apache-2.0
"""Averaging what attention heads compute rather than the factors they store.

A head's output circuit is O V, and its logit circuit K^T Q: products of the matrix that reads the head's inner space
(D, its rows along that space) and the one that writes it (P). The mean circuit is formed and cut back to the head's
rank r,

    C = sum_i w_i D_i^T P_i  ~  U S V^T,      P = T S^1/2 V^T,      D = T S^1/2 U^T,

the best approximation of that rank, in the orthogonal head basis T in which the new factors lie closest to the plain
averages of the old. The circuits are those of "Generalized Linear Mode Connectivity for Transformers" (NeurIPS 2025),
which keeps the products; here the result stays an ordinary model. Measured: helps GPT-2; an option, not a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.data.calibration import Data
from onebasin.engine import Means, Tell
from onebasin.symmetry import Signature
from onebasin.symmetry.groups import polar

from .average import average
from .method import Merged, Method, Sources
from .tensors import Joint, merged_tensors

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Circuit(Method):
    """The average, except that attention heads get the factors of their mean circuits."""

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        signature = sources.signature
        circuits: dict[int | None, list[str]] = {}
        for root in circuit_roots(signature):
            circuits.setdefault(signature.spaces[root].layer, []).append(root)
        groups = []
        for layer, roots in circuits.items():
            touched = dict.fromkeys(r for root in roots for r in signature.touching[root] if r in sources.shared)
            groups.append(tuple(role for role in touched if signature.tensors[role].layer == layer))

        def finish(every: Mapping[str, Sequence[Tensor]], mean: Tensors) -> None:
            """Write the factors of mean circuits into the tensors of a layer's heads."""
            parts = [dict(zip(every, tensors, strict=True)) for tensors in zip(*every.values(), strict=True)]
            for root in circuits[signature.tensors[next(iter(mean))].layer]:
                own = {role: tensor for role, tensor in mean.items() if role in signature.touching[root]}
                average_circuit(signature, root, parts, sources.weights, own)

        return Merged(merged_tensors(sources, average, means, Joint(groups, finish)))


def circuit_roots(signature: Signature) -> list[str]:
    """Return the inner spaces of attention heads in which only matrices act."""
    return [
        root
        for root, kind in signature.kinds.items()
        if kind == "linear" and signature.spaces[root].part == "attention" and signature.spaces[root].batch
    ]


def average_circuit(
    signature: Signature, root: str, models: Sequence[Tensors], weights: Sequence[float], mean: Tensors
) -> None:
    """Write the factors of the mean circuit of `root` into the tensors of `mean`, in place.

    models: for each, role -> aligned tensor, over all tensors that touch `root`. mean: their plain average.
    """
    depth = len(signature.spaces[root].batch)

    def factors(tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return the matrices that write the space, (*heads, r, inputs), and those that read it, (*heads, r,
        outputs)."""
        sides: dict[bool, list[Tensor]] = {False: [], True: []}
        for role in mean:
            for view, leaf, _ in signature.views(role, tensors[role], root):
                sides[leaf.dual].append(view.reshape(*view.shape[: depth + 1], -1))
        return torch.cat(sides[False], -1), torch.cat(sides[True], -1)

    parts = [factors(tensors) for tensors in models]
    inputs = torch.cat([w * primal for w, (primal, _) in zip(weights, parts, strict=True)], -2)  # (*heads, m r, in)
    outputs = torch.cat([dual for _, dual in parts], -2)  # (*heads, m r, out)
    # C has at most rank m r: after a thin QR of both factors, only a small matrix is decomposed.
    q_in, r_in = torch.linalg.qr(inputs.mT)
    q_out, r_out = torch.linalg.qr(outputs.mT)
    u, s, vh = torch.linalg.svd(r_out @ r_in.mT)
    old_primal, old_dual = factors(mean)
    r = old_primal.shape[-2]
    half = s[..., :r].sqrt().unsqueeze(-1)
    primal, dual = half * (vh[..., :r, :] @ q_in.mT), half * (q_out @ u[..., :r]).mT
    turn = polar(old_primal @ primal.mT + old_dual @ dual.mT)
    new = {False: turn @ primal, True: turn @ dual}
    start = {False: 0, True: 0}
    for role in mean:
        for view, leaf, _ in signature.views(role, mean[role], root):
            width = view[(0,) * (depth + 1)].numel()
            piece = new[leaf.dual][..., start[leaf.dual] : start[leaf.dual] + width]
            view.copy_(piece.reshape(view.shape))
            start[leaf.dual] += width
