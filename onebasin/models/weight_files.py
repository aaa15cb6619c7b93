# SPDX-License-Identifier: Apache-2.0
"""Writing the weights of a model: tensor by tensor in this process, or file by file as tasks of a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from onebasin import engine
from onebasin.engine import behind, on_ray

from .errors import ModelError
from .folder import finite
from .lazy_tensors import Group, LazyTensors
from .model import Model
from .shards import HALF, Cut, Shard, room_for


@dataclass(frozen=True)
class Target:
    """folder: the hidden folder to write. out: its final place, for errors. like, dtype: as in `write_model`."""

    folder: Path
    out: Path
    like: Model
    dtype: torch.dtype | None

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """The tensors that the table ignores (counters, masks), which are written as the model `like` has them."""
        return self.like.origin.ignored()

    def stored(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype on disk of a tensor that is computed in `dtype`."""
        if not dtype.is_floating_point or name in self.kept:
            return dtype
        return self.dtype or self.like.origin.dtypes.get(name, self.like.origin.stored_dtype)

    def ready(self, name: str, tensor: Tensor, copy: bool = True) -> Tensor:
        """Return a tensor as it is stored: on the CPU, in its dtype, contiguous.

        copy: give it memory of its own, since it is written while the caller goes on and may reuse the tensor's.
        """
        wanted = self.stored(name, tensor.dtype)
        stored = tensor.detach().to("cpu", wanted, copy=copy, memory_format=torch.contiguous_format)
        return stored.contiguous()  # `to` ignores the memory format if nothing else changes

    def refuse_infinite(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not finite(tensor) and name not in self.kept:
            kind = name_of(tensor.dtype)
            raise ModelError(f"the tensor '{name}' is not finite in {kind}; write a wider dtype")


@dataclass
class File:
    """The names in a weight file, and the groups of `LazyTensors` that contain them. number: from 0."""

    number: int
    names: list[str] = field(default_factory=list)
    size: int = 0  # bytes of numbers
    groups: list[Group] = field(default_factory=list)


def write_weights(target: Target, tensors: Iterable[tuple[str, Tensor]], limit: int) -> None:
    """Write files of at most `limit` bytes, and name them once the number of files is known. Tensors that the table
    ignores come last.

    If `tensors` can be computed on a cluster, every file is a task, which computes and writes its tensors. The task of
    a lost worker is run again. Either way, the files contain the same tensors and the same bytes.
    """
    cut = Cut(room_for(*target.like.origin.files, *("spare",) * 64), limit)
    if isinstance(tensors, LazyTensors) and tensors.ray:
        files = list(on_ray(partial(_task, target, tensors, cut.room), foreseen(target, tensors, cut), tensors.ray))
    else:
        files = _written(target, tensors, cut, rest=target.kept.items())
    if not files:
        raise ModelError("there are no tensors to write")
    with clearly(target.out):
        for half in target.folder.glob(f"*{HALF}"):  # of a worker that was lost
            half.unlink()
        _name_shards(target.folder, files)


def foreseen(target: Target, making: LazyTensors, cut: Cut) -> list[File]:
    """Return the files that will hold the tensors of `making`, from shapes alone."""
    files: list[File] = []
    made = ((group, pair) for group in making.groups for pair in making.foreseen(group))
    for group, (name, tensor) in chain(made, ((None, pair) for pair in target.kept.items())):
        size = tensor.numel() * target.stored(name, tensor.dtype).itemsize
        if cut.next(name, size) == len(files):
            files.append(File(len(files)))
        files[-1].names.append(name)
        files[-1].size += size
        if group is not None and group not in files[-1].groups:
            files[-1].groups.append(group)
    return files


def _task(target: Target, making: LazyTensors, room: int, file: File) -> File:
    """Compute and write one file. Other tensors of its groups belong to the file before or after it."""
    wanted = set(file.names)
    made = (pair for group in file.groups for pair in making.of(group))
    pairs = (pair for pair in chain(made, target.kept.items()) if pair[0] in wanted)
    (written,) = _written(target, pairs, Cut(room, sys.maxsize), file.number)
    if written.size != file.size:
        raise RuntimeError(f"the tensors of '{target.out}' do not have the expected shapes")
    return written


def _written(
    target: Target,
    tensors: Iterable[tuple[str, Tensor]],
    cut: Cut,
    first: int = 0,
    rest: Iterable[tuple[str, Tensor]] = (),
) -> list[File]:
    """Write the files from number `first` on, `rest` after all other tensors. A tensor is written in a thread of its
    own while the next is made."""
    shards: list[Shard] = []
    seen: set[str] = set()
    copy = not isinstance(tensors, LazyTensors)

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in chain(tensors, (pair for pair in rest if pair[0] not in seen)):
            if name in seen:
                raise ModelError(f"the tensor '{name}' occurs twice")
            seen.add(name)
            stored = target.ready(name, tensor, copy)
            target.refuse_infinite(name, stored)
            yield name, stored

    def write(pair: tuple[str, Tensor]) -> None:
        name, tensor = pair
        with clearly(target.out):
            if cut.next(name, tensor.nbytes) == len(shards):
                if shards:
                    shards[-1].close()
                shards.append(Shard(target.folder / f"{first + len(shards)}.safetensors", cut.room_for(name)))
            shards[-1].add(name, tensor)

    try:
        behind(write, made())
        if shards:
            with clearly(target.out):
                shards[-1].close()
    finally:
        for shard in shards:
            shard.abandon()
    return [File(first + i, [*shard.header][1:], shard.size) for i, shard in enumerate(shards)]


def _name_shards(folder: Path, files: Sequence[File]) -> None:
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    where = {}
    for file in files:
        name = f"model-{file.number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{file.number}.safetensors").rename(folder / name)
        where.update(dict.fromkeys(file.names, name))
    index = {"metadata": {"total_size": sum(file.size for file in files)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CannotWrite(ModelError, OSError):
    """An output could not be written because of its place or the disk."""


def clearly(out: Path, what: str = "the model") -> AbstractContextManager[None]:
    """Turn a failed write into a CannotWrite with a clear message."""
    return engine.clearly(out, what, CannotWrite)
