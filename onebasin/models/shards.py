# SPDX-License-Identifier: Apache-2.0
"""A safetensors file read and written tensor by tensor, so that none of it has to be in memory but the one at hand.

The format puts a JSON header with all offsets before the numbers. Room for it is kept free, filled in at the end, and
padded with spaces, which the format allows.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
DTYPES_BY_CODE = {code: dtype for dtype, code in CODES.items()}
_METADATA = {"__metadata__": {"format": "pt"}}
_ALIGNED = 8  # bytes
HALF = ".half"  # how the name of a file ends that is being written


@dataclass(frozen=True)
class Place:
    """Where a file holds a tensor: its bytes from `start` to `end`, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def places(file: Path) -> dict[str, Place]:
    """The tensors of a file that its format's own reader has found whole; those of unusual dtypes are left out."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in DTYPES_BY_CODE:
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = Place(DTYPES_BY_CODE[entry["dtype"]], tuple(entry["shape"]), start, end)
    return found


def pages_of(file: Path) -> mmap.mmap:
    """The file, mapped, privately: nothing can change it."""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def mapped(pages: mmap.mmap, place: Place) -> Tensor:
    """A tensor straight from its file, not to be written into: another read may share its memory, which is given back
    with it, since else the mapping would come to hold the whole file."""
    if place.start == place.end:
        return torch.empty(place.shape, dtype=place.dtype)
    view = memoryview(pages)[place.start : place.end]
    weakref.finalize(view, _give_back, pages, place.start, place.end).atexit = False
    return torch.frombuffer(view, dtype=place.dtype).reshape(place.shape)


def _give_back(pages: mmap.mmap, start: int, end: int) -> None:
    """Let go of the pages that lie wholly between; a tensor beside it has its share of the others."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(pages, "madvise") and first < last:
        pages.madvise(mmap.MADV_DONTNEED, first, last - first)


class Cut:
    """Where one file ends and the next begins. Each holds at most `limit` bytes of numbers, and names for `room` bytes
    of header, or else a single tensor."""

    def __init__(self, room: int, limit: int) -> None:
        self.room, self.limit = room, limit
        self._files = self._size = self._header = 0

    def next(self, name: str, nbytes: int) -> int:
        """The number of the file, from 0, that takes the next tensor."""
        size, header = self._size + nbytes, self._header + room_for(name)
        if not self._files or size > self.limit or header > self.room:
            self._files, size, header = self._files + 1, nbytes, room_for("metadata", name)
        self._size, self._header = size, header
        return self._files - 1

    def room_for(self, name: str) -> int:
        """Of the header of a file that begins with this tensor."""
        return max(self.room, room_for("metadata", name))


class Shard:
    """path: of the file, which has another name until it is whole. room: bytes for the header, `room_for` the names
    that may come."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, -(-room // _ALIGNED) * _ALIGNED
        self.header: dict[str, object] = dict(_METADATA)
        self.size = 0  # bytes of numbers
        self._late: list[tuple[str, Tensor]] = []
        self._half = path.with_name(f"{path.name}.{secrets.token_hex(4)}{HALF}")
        self._file = self._half.open("wb")
        self._file.seek(8 + self.room)

    def add(self, name: str, tensor: Tensor) -> None:
        """tensor: contiguous, on the CPU. Those that would leave the next one unaligned wait for the end."""
        self.size += tensor.nbytes
        if tensor.nbytes % _ALIGNED:
            self._late.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Write what waited, then the header."""
        for name, tensor in sorted(self._late, key=lambda pair: -pair[1].element_size()):
            self._write(name, tensor)
        self._late.clear()
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self._file.seek(0)
        self._file.write(self.room.to_bytes(8, "little") + text.ljust(self.room))
        self._file.flush()
        os.fsync(self._file.fileno())  # here, where it was written: elsewhere a cluster's nodes would not see it
        self._file.close()
        self._half.replace(self.path)

    def abandon(self) -> None:
        """Let go of a file that is not whole, and remove it."""
        self._late.clear()
        if not self._file.closed:
            with suppress(OSError):
                self._file.close()
            self._half.unlink(missing_ok=True)

    def _write(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in CODES:
            raise ValueError(f"the tensor '{name}' of {tensor.dtype} cannot be stored; convert it first")
        start = self._file.tell() - 8 - self.room
        self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        end = start + tensor.nbytes
        self.header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}


def room_for(*names: str) -> int:
    """Bytes that suffice for the header entries of tensors with these names; an entry's are enough for the metadata."""
    return sum(len(json.dumps(name)) + 192 for name in names)
