# SPDX-License-Identifier: Apache-2.0
"""Tied tensors and norms without weights: tensors that a file omits, as parts of the signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .classes import Classes
from .signature import Entry, Signature


def with_ties(signature: Signature) -> Signature:
    """Return the signature with the tied tensors that the file omits, and with weights for norms that have none.

    Heads come at the end, and other tied tensors (embeddings of a decoder) after those that they are tied to.
    """
    tensors: dict[str, Entry] = {}
    for role, entry in signature.tensors.items():
        tensors |= {other: e for other, e in signature.absent.items() if e.notes.get("bare") == role}
        tensors[role] = entry
        tensors |= {other: e for other, e in signature.absent.items() if e.notes.get("tied") == role and not e.head}
    return replace(signature, tensors={**tensors, **signature.absent}, absent={})


def without_ties(signature: Signature) -> Signature:
    stored = {role: entry for role, entry in signature.tensors.items() if entry.stored}
    absent = {role: entry for role, entry in signature.tensors.items() if not entry.stored}
    return replace(signature, tensors=stored, absent=absent)


def separate(signature: Signature) -> Signature:
    """Return the signature without ties, in which every tensor has its own numbers."""
    tensors = {role: replace(e, alias=None, stored="bare" not in e.notes) for role, e in signature.tensors.items()}
    return replace(signature, tensors=tensors)


def parted(signature: Signature) -> Signature:
    """Return the signature without ties, in which spaces that only ties had joined are separate spaces."""
    classes = Classes(list(signature.spaces))
    for norm in signature.norms:
        classes.join(norm.source, norm.target)
    return replace(separate(signature), root={key: classes.find(key) for key in signature.spaces})


def bare(entry: Entry) -> Tensor:
    """Return the weight of a norm that stores none."""
    return torch.ones(entry.shape)


def share(signature: Signature, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all roles. Tied ones are the same object, so that writing to one changes both. If the
    file omits one that is no longer tied, it gets a copy."""
    found = dict(tensors)
    for role, entry in signature.tensors.items():
        if entry.alias is not None:
            found[role] = found[entry.alias]
        elif "bare" in entry.notes:
            found[role] = bare(entry).to(next(iter(tensors.values())))
        elif role not in found:
            found[role] = found[entry.notes["tied"]].clone()
    return found
