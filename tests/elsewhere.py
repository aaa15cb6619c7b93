# SPDX-License-Identifier: Apache-2.0
"""A device for tests: its tensors lie in main memory, but mix with the CPU's no more than those of a GPU do.

    onebasin.match(a, b, folder, device=elsewhere.NAME)

A tensor on the device is a wrapper. An operation on wrapped tensors runs on the CPU, and what comes out is wrapped. One
that takes both kinds raises, but for numbers (tensors without axes), copies, and indices, which GPUs take, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "elsewhere"
COPIES = {"aten::copy_", "aten::_to_copy"}
SIZED = [("arange", ""), ("arange", ".start"), ("arange", ".start_step"), ("eye", ""), ("eye", ".m"),
         ("linspace", ""), ("randperm", ""), ("tril_indices", ""), ("triu_indices", "")]  # fmt: skip
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Away(Tensor):
    """A tensor on the device. here: its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        with torch.inference_mode(False):  # whose tensors could not be viewed
            found = Tensor._make_wrapper_subclass(
                cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
                layout=here.layout, device=torch.device(NAME, 0),
            )  # fmt: skip
        found.here = here
        return found

    def __init__(self, here: Tensor) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"Away({self.here!r})"

    def tolist(self) -> Any:
        return self.here.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"a tensor on {NAME} cannot become an array; copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        parts = func.decompose(*args, **kwargs)  # in inference mode operations come that are made of others
        if parts is not NotImplemented:
            return parts
        given = list(_tensors((*args, *kwargs.values())))
        if name not in COPIES:
            stray = [one for one in (given[:1] if name in INDEXED else given)
                     if not isinstance(one, Away) and one.dim() > 0]  # fmt: skip
            if stray:
                raise RuntimeError(f"{name}: a tensor {tuple(stray[0].shape)} of the CPU meets one on {NAME}")
            if kwargs.get("generator") is not None:
                raise RuntimeError(f"{name}: a generator of the CPU meets a tensor on {NAME}")
        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type != NAME
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        here = _mapped(args, Away, lambda one: one.here)
        out = func(*here, **dict(zip(kwargs, _mapped(kwargs.values(), Away, lambda one: one.here), strict=True)))
        if func._schema.is_mutable:
            return kwargs.get("out", given[0])
        if name == "aten::_conj":
            out = torch.conj_physical(here[0])  # a wrapper would forget that its numbers are to be conjugated
        return out if leaves else _mapped((out,), Tensor, Away)[0]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:  # in lists at most; pytree would take longer than most operations
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(values: Iterable[Any], kind: type[Tensor], change: Callable[[Any], Any]) -> list[Any]:
    """The values, those of a kind changed, in lists too."""
    return [change(value) if isinstance(value, kind)
            else type(value)(_mapped(value, kind, change)) if isinstance(value, (list, tuple))
            else value for value in values]  # fmt: skip


class _Backend(_DummyBackendModule):
    """What torch asks of a device. Random numbers are drawn on the CPU's own generator."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        pass


@cache
def register() -> None:
    """Make the device known to torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return Away(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return Away(torch.empty_strided(size, stride, dtype=dtype))

    def made(name: str) -> Any:
        return lambda *args, device=None, **how: Away(getattr(torch, name)(*args, **how))

    for name, overload in SIZED:
        library.impl(f"{name}{overload}", made(name), "PrivateUse1")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        here, there = (one.here if isinstance(one, Away) else one for one in (source, target))
        there.copy_(here)
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    register.library = library  # type: ignore[attr-defined] # it lives as long as this
