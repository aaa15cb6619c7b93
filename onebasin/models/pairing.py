# SPDX-License-Identifier: Apache-2.0
"""The tensors of two models that can be compared, matched and averaged, and reading them in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetry import Entry, Signature, Space
from onebasin.symmetry.tables.axes import show

from .errors import ModelError
from .model import Model


@dataclass(frozen=True)
class Shared:
    """roles: those that both models have, in a's order. only_a, only_b: those that only one of them has.

    differing: roles that both have, but for different tasks (other classes, other labels), with all tensors of such a
    head. Aliases (tied tensors) are in none of the four.
    """

    roles: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differing: tuple[str, ...]


def shared_roles(a: Model, b: Model) -> Shared:
    """Return the tensors that `a` and `b` have in common.

    The number of positions (`rows`) may differ: the leading ones are shared. Task heads may differ: they are listed
    apart.

    Raises:
        ModelError: The models differ in anything else: family, layers, widths, vocabulary, activation function.
    """
    mine, theirs = a.signature, b.signature
    if mine.family != theirs.family:
        raise ModelError(f"'{a.name}' is of family {mine.family}, '{b.name}' of {theirs.family}: "
                         "they cannot be paired")  # fmt: skip
    _same(a, b, "number of layers", len(mine.layers), len(theirs.layers))
    # Layers that share their weights (ALBERT) are counted by the config alone.
    _same(a, b, "number of layers", a.config.get("num_hidden_layers"), b.config.get("num_hidden_layers"))
    ours, yours = _own(mine), _own(theirs)
    both = [role for role in ours if role in yours]
    for role in both:
        if not mine.tensors[role].head:
            _same_axes(a, b, role)
    differing = _whole_heads(mine, {role for role in both if mine.tensors[role].head and _differs(a, b, role)})
    return Shared(
        tuple(role for role in both if role not in differing),
        tuple(role for role in ours if role not in yours),
        tuple(role for role in yours if role not in ours),
        tuple(role for role in both if role in differing),
    )


@dataclass(frozen=True)
class Common:
    """roles: those that all models have. differing: those that only some have, or that differ in their labels."""

    roles: list[str]
    differing: list[str]


def common_roles(models: Sequence[Model]) -> Common:
    """Return the roles that all models share, in the order of the first one.

    Raises:
        ModelError: As in `shared_roles`.
    """
    pairs = [shared_roles(model, models[0]) for model in models[1:] or models]
    roles = [role for role in pairs[0].roles if all(role in pair.roles for pair in pairs)]
    kept = set(roles)
    differing = [role for model in models for role, entry in model.signature.tensors.items()
                 if role not in kept and entry.alias is None]  # fmt: skip
    return Common(roles, list(dict.fromkeys(differing)))


def of_one_width(models: Sequence[Model]) -> bool:
    """Return whether all spaces except positions and classes have the same size in all models."""
    return all(
        space.kind in ("rows", "labels") or space.size == model.signature.sizes.get(key, space.size)
        for model in models[1:]
        for key, space in models[0].signature.spaces.items()
    )


def read_pair(
    a: Model, b: Model, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the tensor `role` of both models, cut to the leading rows that both have.

    Raises:
        ModelError: The shapes differ in other ways, or a tensor contains NaN or infinity.
    """
    x, y = a.read(role, dtype, device), b.read(role, dtype, device)
    spaces = a.signature.spaces
    for dim, axis in enumerate(a.signature.tensors[role].axes):
        space = spaces.get(getattr(axis, "space", ""))  # a flattened axis has no single space, and is never cut
        if space is not None and space.kind == "rows":
            rows = min(x.shape[dim], y.shape[dim])
            x, y = x.narrow(dim, 0, rows), y.narrow(dim, 0, rows)
    if x.shape != y.shape:
        raise ModelError(f"'{role}' has shape {tuple(x.shape)} in '{a.name}' and {tuple(y.shape)} in '{b.name}'")
    return x, y


def refuse_unlike(first: Mapping[str, Tensor], second: Mapping[str, Tensor], refusal: str) -> None:
    """Raise ValueError, beginning with `refusal`, for a tensor that only one has, or that differs in shape."""
    for name in sorted(first.keys() ^ second.keys()):
        raise ValueError(f"{refusal}: only one of them has the tensor '{name}'")
    for name, tensor in first.items():
        if tensor.shape != second[name].shape:
            shapes = f"{tuple(tensor.shape)} and {tuple(second[name].shape)}"
            raise ValueError(f"{refusal}: the tensor '{name}' has the shapes {shapes}")


def corner(shapes: Iterable[Sequence[int]]) -> tuple[slice, ...]:
    """Return the index of the part that tensors of these shapes have in common; some may have more rows."""
    return tuple(map(slice, map(min, zip(*shapes, strict=True))))


def refuse_other_spaces(a: Model, role: str, b: Model, other: str) -> None:
    """Refuse to replace the tensor `role` of `a` by `other` of `b`, possibly of another layer, if their spaces differ.

    Task heads and missing tensors are not checked.

    Raises:
        ModelError: The families differ, or spaces (heads, neurons) differ in size: equal shapes are not enough, since
            eight heads of 4 have the shape of four heads of 8.
    """
    mine, theirs = a.signature, b.signature
    _same(a, b, "family", mine.family, theirs.family)
    one, two = mine.tensors[role], theirs.tensors.get(other)
    if one.head or two is None:
        return
    for x, y in zip(mine.leaves(one), theirs.leaves(two), strict=False):
        _same_space(a, b, role, mine.spaces[x.space], theirs.spaces[y.space])


def _own(signature: Signature) -> dict[str, Entry]:
    return {role: entry for role, entry in signature.tensors.items() if entry.alias is None}


def _same(a: Model, b: Model, what: str, in_a: object, in_b: object) -> None:
    if in_a != in_b:
        raise ModelError(f"the models differ in {what}: {in_a} in '{a.name}', {in_b} in '{b.name}'")


def _same_axes(a: Model, b: Model, role: str) -> None:
    """Raise ModelError, naming the space, if the axes of `role` differ in more than rows."""
    mine, theirs = a.signature, b.signature
    one, two = mine.tensors[role], theirs.tensors[role]
    _same(a, b, f"the axes of '{role}'", show(one.axes), show(two.axes))
    _same(a, b, f"the norm '{role}'", one.norm, two.norm)
    for leaf in mine.leaves(one):
        _same_space(a, b, role, mine.spaces[leaf.space], theirs.spaces[leaf.space])


def _same_space(a: Model, b: Model, role: str, x: Space, y: Space) -> None:
    _same(a, b, f"what may act on '{x.name}' (activation function)", x.kind, y.kind)
    if x.kind != "rows":
        _same(a, b, f"the size of '{x.name}' (in '{role}')", x.size, y.size)


def _differs(a: Model, b: Model, role: str) -> bool:
    """Whether a head's tensor has other axes, other sizes, or other labels in the two models."""
    try:
        _same_axes(a, b, role)
    except ModelError:
        return True
    spaces = a.signature.spaces
    labelled = any(spaces[leaf.space].kind == "labels" for leaf in a.signature.leaves(a.signature.tensors[role]))
    return labelled and _labels(a) != _labels(b)


def _labels(model: Model) -> dict[str, str]:
    given = model.config.get("id2label")
    return {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {}


def _whole_heads(signature: Signature, differing: set[str]) -> set[str]:
    """Return the head tensors with all others of the same heads: those joined by spaces that only heads have.

    An output layer that is copied from one model needs the hidden layer that it was trained with.
    """
    body = {leaf.space for entry in signature.tensors.values() if not entry.head for leaf in signature.leaves(entry)}

    def inner(role: str) -> set[str]:
        return {leaf.space for leaf in signature.leaves(signature.tensors[role])} - body

    grown, whole = differing, set(differing)
    while grown:
        spaces = set().union(*map(inner, grown))
        heads = {role for role, entry in _own(signature).items() if entry.head}
        grown = {role for role in heads - whole if inner(role) & spaces}
        whole |= grown
    return whole
