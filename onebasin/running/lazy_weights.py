# SPDX-License-Identifier: Apache-2.0
"""A stock `transformers` model that holds no weights: each is made when the model asks for it, and let go.

Such a model runs once in the memory of a few tensors, whatever its size. Where a tensor on disk goes is not repeated
here but observed, as in `stock`: the class loads tensors that nobody filled in, which take no memory, and where such a
tensor lies in the model is where its numbers will be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Make = Callable[[str], Tensor]  # by its name on disk, in the dtype and on the device where the model runs


class Awaited(Tensor):
    """Stands for a tensor wherever torch takes one, and is made anew for every operation on its numbers."""

    make: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, device: str, make: Callable[[], Tensor]) -> Awaited:
        made: Awaited = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device(device))
        made.make = make
        torch._C._set_throw_on_mutable_data_ptr(made)  # there is no memory to look into
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Awaited, lambda awaited: awaited.make(), (args, {**(kwargs or {})}))
        return func(*args, **kwargs)


def stand_ins(like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """For every tensor of floating-point numbers, one of its shape whose memory is hardly touched, and so not taken.

    Only the first and the last number are set, to NaN: a copy has them, and so have the parts that one is cut into.
    """
    found = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in like.items()
             if tensor.is_floating_point() and tensor.numel()}  # fmt: skip
    for tensor in found.values():
        tensor.view(-1)[:: max(1, tensor.numel() - 1)] = torch.nan
    return found


def placed(model: nn.Module, given: Mapping[str, Tensor]) -> set[str]:
    """The stand-ins, by name, that a model which was loaded with them holds as they are, as parameters or buffers."""
    name_of = _naming(given)
    return {name for kind in ("_parameters", "_buffers") for *_, held in _held(model, kind) if (name := name_of(held))}


def await_weights(model: nn.Module, given: Mapping[str, Tensor], make: Make, dtype: torch.dtype, device: str) -> bool:
    """Let every parameter of a model that is a stand-in be made when it is asked for.

    Return whether the model can be used: not where it holds copies of stand-ins.

    given: the stand-ins, by names on disk. make: makes a tensor, by its name on disk. dtype, device: of all else, which
    stays, and of buffers, which are made at once.
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
    for held in spent:  # whoever kept it besides is told so by its shape, rather than given nonsense
        held.data = held.new_empty(0)
    return all(bool(held.isfinite().all()) for _, _, held in _held(model, "_buffers") if held.is_floating_point())


def _naming(given: Mapping[str, Tensor]) -> Callable[[Tensor], str | None]:
    """The name of the stand-in that a tensor is, if it is one."""
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
