# SPDX-License-Identifier: Apache-2.0
"""Making the merged model's tensors one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from onebasin.engine import Means
from onebasin.models import LazyTensors
from onebasin.models.pairing import corner
from onebasin.symmetry import Entry, Signature

from .average import average
from .method import Sources

Combine = Callable[[list[Tensor], Sequence[float], Signature, Entry], Tensor]


@dataclass(frozen=True)
class Joint:
    """Tensors that are merged together.

    groups: sets of roles. finish: called with the tensors of such a set, role -> one per model, and with those that
    were combined one by one, which it changes in place.
    """

    groups: Sequence[tuple[str, ...]]
    finish: Callable[[Mapping[str, Sequence[Tensor]], Mapping[str, Tensor]], None]


def merged_tensors(
    sources: Sources, combine: Combine, means: Means | None = None, joint: Joint | None = None
) -> LazyTensors:
    """Return the merged model's tensors under the template's names, one at a time.

    What the models share is combined; all else is the template's. Where position tables differ in length, the common
    rows are combined, and the other rows are the template's.

    combine: makes one tensor of those of all models. joint: tensors that are merged together.
    """
    means = means or Means(workers=1)
    signature, template = sources.signature, sources.template

    def merged(role: str, tensors: list[Tensor]) -> Tensor:
        base = tensors[template]
        common = corner(tensor.shape for tensor in tensors)
        mean = combine([tensor[common] for tensor in tensors], sources.weights, signature, signature.tensors[role])
        if mean.shape == base.shape:
            return mean
        whole = base.clone()
        whole[common] = mean
        return whole

    def single(role: str) -> Tensor:
        if sources.has(role):
            return merged(role, sources.read(role, means))
        return sources.models[template].read(role, means.dtype, means.device)

    together = {role: roles for roles in (joint.groups if joint else ()) for role in roles}

    def make(roles: Sequence[str]) -> dict[str, Tensor]:
        if joint is None or roles[0] not in together:
            return {role: single(role) for role in roles}
        every = {role: sources.read(role, means) for role in roles}
        mean = {role: merged(role, tensors) for role, tensors in every.items()}
        joint.finish(every, mean)
        return mean

    groups = dict.fromkeys(together.get(role, (role,)) for role in signature.tensors)
    return LazyTensors(signature, make, [*groups], means.workers, means.ray)


def averaged(sources: Sources, means: Means) -> Callable[[str], Tensor]:
    """Return role -> the weighted average, for a merged model that is held in this process."""
    lazy = merged_tensors(sources, average, replace(means, workers=1, ray=None))
    return lambda role: lazy.make([role])[role]
