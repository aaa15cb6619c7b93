# SPDX-License-Identifier: Apache-2.0
"""A stock `transformers` model without weights in memory: each is read or computed when the model uses it, and dropped.

Such a model runs in the memory of a few tensors, whatever its size. The mapping from names on disk to parameters is
observed, as in `loaded`: the class loads uninitialised tensors, which take no memory, and wherever one of them ends up
in the model, its values will be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Make = Callable[[str], Tensor]  # name on disk -> tensor, in the dtype and on the device of the model


class Awaited(Tensor):
    """A stand-in for a tensor in every operation of torch, which then computes it anew."""

    make: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, device: str, make: Callable[[], Tensor]) -> Awaited:
        made: Awaited = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device(device))
        made.make = make
        torch._C._set_throw_on_mutable_data_ptr(made)  # it has no memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Awaited, lambda awaited: awaited.make(), (args, {**(kwargs or {})}))
        return func(*args, **kwargs)


def stand_ins(like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return, for every floating-point tensor, one of its shape whose memory is hardly touched, and so not allocated.

    Only the first and the last entry are set, to NaN: copies have them as well, and so do parts of a tensor.
    """
    found = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in like.items()
             if tensor.is_floating_point() and tensor.numel()}  # fmt: skip
    for tensor in found.values():
        tensor.view(-1)[:: max(1, tensor.numel() - 1)] = torch.nan
    return found


def placed(model: nn.Module, given: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the stand-ins that a model loaded with them has, unchanged, as parameters or buffers."""
    name_of = _naming(given)
    return {name for kind in ("_parameters", "_buffers") for *_, held in _held(model, kind) if (name := name_of(held))}


def await_weights(model: nn.Module, given: Mapping[str, Tensor], make: Make, dtype: torch.dtype, device: str) -> bool:
    """Replace every parameter of a model that is a stand-in by one that is computed when it is used.

    Return whether the model can be used, which it cannot if it has copies of stand-ins.

    given: the stand-ins, by names on disk. make: returns a tensor by its name on disk. dtype, device: of buffers, which
    are computed at once, and of all other tensors, which are kept.
    """
    name_of = _naming(given)
    spent = []
    for slots, key, held in _held(model, "_buffers"):
        name = name_of(held)
        slots[key] = make(name) if name else held.to(device, dtype if held.is_floating_point() else None)
    for slots, key, held in _held(model, "_parameters"):
        name = name_of(held)
        if name:
            spent.append(held)
            slots[key] = Awaited(given[name], device, partial(make, name))
        else:
            if not held.isfinite().all():
                return False
            held.data = held.data.to(device, dtype)
    for held in spent:  # code that kept a reference gets an error about the shape, rather than nonsense
        held.data = held.new_empty(0)
    return all(bool(held.isfinite().all()) for _, _, held in _held(model, "_buffers") if held.is_floating_point())


def _naming(given: Mapping[str, Tensor]) -> Callable[[Tensor], str | None]:
    """Return a function that returns the name of a stand-in, and None for any other tensor."""
    place = {tensor.data_ptr(): name for name, tensor in given.items()}

    def name_of(held: Tensor) -> str | None:
        name = place.get(held.data_ptr())
        same = name is not None and held.shape == given[name].shape and held.stride() == given[name].stride()
        return name if same else None

    return name_of


def _held(model: nn.Module, kind: str) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
    for module in model.modules():
        slots: dict[str, Tensor | None] = getattr(module, kind)
        yield from ((slots, key, held) for key, held in [*slots.items()] if held is not None)  # type: ignore[misc]
