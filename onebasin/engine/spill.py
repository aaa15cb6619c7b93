# SPDX-License-Identifier: Apache-2.0
"""Memory for the tensors of paused computations: those for which there is no room move to a temporary file."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .memory import return_freed

LEAST = 2**14  # bytes of the smallest tensor that is worth moving


class Spill(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that keeps tensors of paused computations in a file, and brings them back when an operation needs them.
    Only one thread at a time may compute in it.

    A storage is emptied and filled again in place, so tensors and views of it stay valid.

    Args:
        room: Bytes that paused computations may take in memory.
        folder: Of the temporary file (default: the system's).
    """

    def __init__(self, room: int, folder: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.taken = 0  # bytes in memory that paused computations hold
        self._file = _File(folder)
        self._pages: dict[int, _Page] = {}  # address of a storage -> its page
        self._made: list[_Page] = []  # since the last computation paused
        self._held: dict[int, tuple[list[_Page], int]] = {}  # computation -> its pages, and their bytes in memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, (*kwargs.values(),)))}
        for address in given & self._pages.keys():
            self._pages[address].restore(changes=func._schema.is_mutable)
        made = func(*args, **kwargs)
        for storage in _storages((made,)):
            new = storage._cdata not in given and storage._cdata not in self._pages
            if new and storage.nbytes() >= LEAST and storage.resizable():
                page = self._pages[storage._cdata] = _Page(storage, self._file)
                self._made.append(page)
        return made

    def rest(self, number: int) -> None:
        """Pause a computation. What was made since another one paused, and is still in use, belongs to it."""
        pages, before = self._held.get(number, ([], 0))
        alive = []
        for page in pages + self._made:
            if page.alive:
                alive.append(page)
            else:
                page.forget()
                del self._pages[page.address]
        self._made = []
        self.taken += sum(page.in_memory for page in alive) - before
        with _disable_current_modes():
            for page in alive:
                if self.taken > self.room:
                    self.taken -= page.in_memory
                    page.put_away()
        self._held[number] = alive, sum(page.in_memory for page in alive)
        return_freed()  # every thread has a heap of its own, which keeps what is put away

    def restore(self) -> None:
        """Bring back all that is still in use."""
        for page in self._pages.values():
            page.restore()

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class _Page:
    """A storage, whose numbers are in memory, in the file, or in both."""

    def __init__(self, storage: torch.UntypedStorage, file: _File) -> None:
        self.address = storage._cdata
        self.size = self.in_memory = storage.nbytes()
        # While it lives, the address is no other's.
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._file = file
        self._place: int | None = None  # where the file has the same numbers

    @property
    def alive(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]

    def put_away(self) -> None:
        if self.in_memory:
            storage = self._open()
            if self._place is None:
                self.size = storage.nbytes()
                self._place = self._file.write(_bytes(storage))
            storage.resize_(0)
            self.in_memory = 0

    def restore(self, changes: bool = False) -> None:
        """Bring the numbers back to memory. changes: they are about to change."""
        if not self.in_memory and self.alive:
            assert self._place is not None
            storage = self._open()
            storage.resize_(self.size)
            self.in_memory = self.size
            self._file.read(self._place, _bytes(storage))
        if changes:
            self.forget()

    def forget(self) -> None:
        """Give up the place in the file."""
        if self._place is not None:
            self._file.free(self._place, self.size)
            self._place = None

    def _open(self) -> torch.UntypedStorage:
        found: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return found


class _File:
    """A temporary file of places of a few sizes, which are used again and again."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None  # opened when it is needed
        self._buffer = torch.empty(0, dtype=torch.uint8)  # torch lets nobody empty a storage that an array has seen
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # bytes -> places

    def write(self, numbers: Tensor) -> int:
        free = self._free[len(numbers)]
        place = free.pop() if free else self._end
        self._end = max(self._end, place + len(numbers))
        file, buffer = self._at(place, len(numbers))
        buffer.copy_(numbers)
        file.write(buffer.numpy().data)
        return place

    def read(self, place: int, numbers: Tensor) -> None:
        file, buffer = self._at(place, len(numbers))
        file.readinto(buffer.numpy().data)  # type: ignore[attr-defined]
        numbers.copy_(buffer)

    def free(self, place: int, size: int) -> None:
        self._free[size].append(place)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _at(self, place: int, size: int) -> tuple[BinaryIO, Tensor]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (until `close`)
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        self._file.seek(place)
        return self._file, self._buffer[:size]


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:  # pytree would take longer than most operations
        if isinstance(value, (list, tuple)):
            yield from _storages(value)
        elif type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            yield value.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
