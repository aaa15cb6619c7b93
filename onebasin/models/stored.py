# SPDX-License-Identifier: Apache-2.0
"""A file of weights: the names and shapes of its tensors, and the tensors themselves, read one at a time."""

from __future__ import annotations

import mmap
import warnings
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError, one_line
from .shards import DTYPES_BY_CODE, Place, mapped, pages_of, places

_FOUND = "WeightsUnpickler error: "  # before the part of torch's message that says what a pickle contains


class SafeFile:
    """A safetensors file, whose tensors are mapped. Raises ModelError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self._open = path, ExitStack()
        try:
            self._header = self._open.enter_context(safe_open(str(path), "pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"'{path}' is damaged or cut short: {error}") from None

    def names(self) -> list[str]:
        return list(self._header.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype, None for one that is not computed with."""
        return DTYPES_BY_CODE.get(self._header.get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        try:
            place = self._places.get(name)
            if place is None:
                unusual: Tensor = self._header.get_tensor(name)
                return unusual
            return mapped(self._pages, place)
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelError(f"'{self.path}': '{name}' cannot be read ({one_line(error)})") from None

    def close(self) -> None:
        self._open.close()

    @cached_property
    def _places(self) -> dict[str, Place]:
        return places(self.path)

    @cached_property
    def _pages(self) -> mmap.mmap:
        return pages_of(self.path)  # unmapped with the last tensor


class PickleFile:
    """A pickle, read by the loader that builds nothing but tensors and runs no code.

    Raises ModelError if it is damaged, or contains anything else.
    """

    def __init__(self, path: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about how the file was written
                try:
                    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError:  # the older format, without zip, cannot be memory-mapped
                    loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a hostile file can raise anything
            found = str(error).partition(_FOUND)[2].partition("\n")[0]
            found = found.partition(". ")[0]  # torch goes on to explain how to load it anyway
            reason = f"is damaged, or contains more than tensors and could run code ({found or one_line(error)})"
            raise ModelError(f"'{path}' {reason}; it was not loaded") from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
            for name, value in loaded.items()
        ):
            raise ModelError(f"'{path}' is not a dictionary of tensors")
        for name, value in loaded.items():
            if value.is_meta:
                raise ModelError(f"'{path}': the tensor '{name}' is on the device meta and has no values; "
                                 "save the model again from memory")  # fmt: skip
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ModelError(f"'{path}': the tensor '{name}' is larger than what the file stores of it (an "
                                 "expanded tensor); save it again as .contiguous()")  # fmt: skip
        self._tensors: dict[str, Tensor] = {name: value.detach() for name, value in loaded.items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()
