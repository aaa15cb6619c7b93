# SPDX-License-Identifier: Apache-2.0
"""Reading and writing a safetensors file tensor by tensor, so that only one of them has to be in memory.

In this format, a JSON header with all offsets precedes the numbers. Space is reserved for it, filled in at the end, and
padded with blanks, which the format allows.
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
HALF = ".half"  # suffix of a file that is being written


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a file: its bytes from `start` to `end`, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def places(file: Path) -> dict[str, Place]:
    """Return the tensors of a file that safetensors has opened without error, except for those of unusual dtypes."""
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
    """Map a file into memory, privately: nothing can change it."""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def mapped(pages: mmap.mmap, place: Place) -> Tensor:
    """Return a tensor that is mapped from its file. Do not write to it: another read may share its memory. Its pages
    are released together with it; otherwise, the mapping would gradually hold the whole file in memory."""
    if place.start == place.end:
        return torch.empty(place.shape, dtype=place.dtype)
    view = memoryview(pages)[place.start : place.end]
    weakref.finalize(view, _give_back, pages, place.start, place.end).atexit = False
    return torch.frombuffer(view, dtype=place.dtype).reshape(place.shape)


def _give_back(pages: mmap.mmap, start: int, end: int) -> None:
    """Release the pages between `start` and `end`, except for those shared with a neighbouring tensor."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(pages, "madvise") and first < last:
        pages.madvise(mmap.MADV_DONTNEED, first, last - first)


class Cut:
    """The division of tensors into files. Each has at most `limit` bytes of numbers and `room` bytes of header, or else
    a single tensor."""

    def __init__(self, room: int, limit: int) -> None:
        self.room, self.limit = room, limit
        self._files = self._size = self._header = 0

    def next(self, name: str, nbytes: int) -> int:
        """Return the number of the file, from 0, for the next tensor."""
        size, header = self._size + nbytes, self._header + room_for(name)
        if not self._files or size > self.limit or header > self.room:
            self._files, size, header = self._files + 1, nbytes, room_for("metadata", name)
        self._size, self._header = size, header
        return self._files - 1

    def room_for(self, name: str) -> int:
        """Return the bytes to reserve for the header of a file that begins with this tensor."""
        return max(self.room, room_for("metadata", name))


class Shard:
    """A safetensors file that is being written.

    path: of the file, which has another name until it is complete. room: bytes reserved for the header, see `room_for`.
    """

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, -(-room // _ALIGNED) * _ALIGNED
        self.header: dict[str, object] = dict(_METADATA)
        self.size = 0  # bytes of numbers
        self._late: list[tuple[str, Tensor]] = []
        self._half = path.with_name(f"{path.name}.{secrets.token_hex(4)}{HALF}")
        self._file = self._half.open("wb")
        self._file.seek(8 + self.room)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a contiguous tensor on the CPU. One that would leave the next unaligned is written at the end."""
        self.size += tensor.nbytes
        if tensor.nbytes % _ALIGNED:
            self._late.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Write the tensors that were put off, then the header."""
        for name, tensor in sorted(self._late, key=lambda pair: -pair[1].element_size()):
            self._write(name, tensor)
        self._late.clear()
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self._file.seek(0)
        self._file.write(self.room.to_bytes(8, "little") + text.ljust(self.room))
        self._file.flush()
        os.fsync(self._file.fileno())  # on the node of a cluster that wrote it; no other can do it
        self._file.close()
        self._half.replace(self.path)

    def abandon(self) -> None:
        """Close and remove a file that is not complete."""
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
    """Return enough bytes for the header entries of tensors with these names; the metadata needs no more than one."""
    return sum(len(json.dumps(name)) + 192 for name in names)
