# SPDX-License-Identifier: Apache-2.0
"""Writing a model folder: shard by shard into a hidden sibling folder, which takes its place at the end."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onebasin.engine import behind, discard, missing_parents

from .reader import Checkpoint, CheckpointError, finite, one_line
from .shards import Shard, room_for

# What a model folder holds besides weights and config.json. Code (*.py) and other weights are never copied.
TOKENIZER = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "dict.txt", "normalizer.json", "entity_vocab.json",
    "*.model", "*.tiktoken",
)  # fmt: skip
COMPANIONS = (
    "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    *TOKENIZER,
    "LICENSE*", "NOTICE*",
)  # fmt: skip
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"K": 10**3, "M": 10**6, "B": 10**9}  # as mergekit writes them


def write_model(
    out: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    like: Checkpoint,
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    config_updates: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    check: Callable[[Path], object] | None = None,
    inputs: Iterable[str | Path] = (),
    tokenizer: bool = True,
) -> None:
    """Write the folder `out`: weights from `tensors`, everything else from `like`.

    tensors: (name on disk, tensor) pairs, consumed lazily; two or three are in memory at a time.
    dtype: of all floating-point tensors; None keeps what `like` stores under each name.
    config_updates: merged into config.json. files: name -> text, written beside the weights.
    check: called with the finished folder before anyone sees it; what it raises refuses the folder.
    inputs: folders that must not be overwritten, besides `like`. tokenizer: whether its files are copied, too.

    The folder appears whole or not at all. A failure removes what was written; a killed process leaves at
    most a hidden folder beside `out`. Raises CheckpointError for an output that exists, is no model folder or
    is an input, for a tensor that is not finite in its dtype, and for a full disk.
    """
    limit = bytes_of(shard_size)
    with appearing(out, overwrite, [like.folder, *map(Path, inputs)]) as temporary:
        with _clearly(Path(out)):
            _companions(temporary, like, dtype, config_updates or {}, tokenizer)
        _weights(temporary, Path(out), tensors, like, dtype, limit)
        with _clearly(Path(out)):
            for name, text in (files or {}).items():
                (temporary / name).write_text(text, "utf-8")
        if check is not None:
            check(temporary)


@contextmanager
def appearing(out: str | Path, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """A hidden folder beside `out`, which takes its place when the block ends, and vanishes when it fails.

    inputs: folders that must not be overwritten. Raises CheckpointError as `write_model` does.
    """
    out = Path(out).resolve()
    _refuse(out, overwrite, list(inputs))
    made = missing_parents(out)
    temporary = out.parent / f".{out.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with _clearly(out):
            temporary.mkdir(parents=True)
        yield temporary
        with _clearly(out):
            _into_place(temporary, out)
    except BaseException:
        discard(temporary, made)
        raise


def _refuse(out: Path, overwrite: bool, inputs: list[Path]) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise CheckpointError(f"'{out}' exists; choose another folder, or overwrite it (--overwrite)")
    if not (out / "config.json").is_file():
        raise CheckpointError(f"'{out}' is not a model folder (it has no config.json) and is not overwritten")
    for folder in inputs:
        if folder.resolve().is_relative_to(out):
            raise CheckpointError(f"'{out}' holds an input of this command and is not overwritten")


def copy_companions(source: Path, folder: Path, tokenizer: bool = True) -> None:
    """Copy what a model folder holds besides weights and config.json; what is there already stays."""
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)) if tokenizer or pattern not in TOKENIZER else []:
            target = folder / path.relative_to(source)
            if path.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _companions(
    folder: Path, like: Checkpoint, dtype: torch.dtype | None, updates: Mapping[str, Any], tokenizer: bool
) -> None:
    copy_companions(like.folder, folder, tokenizer)
    config = {**like.raw_config, **updates}
    if dtype is not None:
        name = _name(dtype)
        config = _with_dtype(config, name)
        if not {"dtype", "torch_dtype"} & config.keys():
            config["torch_dtype"] = name  # the older key: every version of transformers reads it
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, "utf-8")


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with `name` wherever it states a dtype, in the configs of its components too."""
    return {
        key: name
        if key in ("dtype", "torch_dtype")
        else _with_dtype(value, name)
        if isinstance(value, dict) and key.endswith("_config")
        else value
        for key, value in config.items()
    }


def _weights(
    folder: Path,
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    like: Checkpoint,
    dtype: torch.dtype | None,
    limit: int,
) -> None:
    """Write the shards into `folder` (`out` in errors); they get their names once their number is known.

    A tensor is written in a thread of its own while the next one is made.
    """
    room = room_for(*like.files, *("spare",) * 64)
    shards: list[Shard] = []
    seen: set[str] = set()

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in seen:
                raise CheckpointError(f"the tensor '{name}' comes twice")
            seen.add(name)
            yield name, _ready(name, tensor, like, dtype)

    def write(pair: tuple[str, Tensor]) -> None:
        name, tensor = pair
        _refuse_infinite(name, tensor, like)
        with _clearly(out):
            if not shards or (shards[-1] and not shards[-1].fits(name, limit, tensor.nbytes)):
                if shards:
                    shards[-1].close()
                shards.append(Shard(folder / f"{len(shards)}.safetensors", max(room, room_for(name, name))))
            shards[-1].add(name, tensor)

    try:
        behind(write, made())
        if not shards:
            raise CheckpointError("there are no tensors to write")
        with _clearly(out):
            shards[-1].close()
            _name_shards(folder, [[*shard.header][1:] for shard in shards], sum(shard.size for shard in shards))
    finally:
        for shard in shards:
            shard.abandon()


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    where = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _ready(name: str, tensor: Tensor, like: Checkpoint, dtype: torch.dtype | None) -> Tensor:
    """A copy as it is stored: on the CPU, in its dtype, contiguous.

    It has memory of its own: it is written while the caller goes on, who may use the tensor's memory again.
    """
    wanted = tensor.dtype
    if tensor.is_floating_point():
        wanted = dtype or like.dtypes.get(name, like.stored_dtype)
    return tensor.detach().to("cpu", wanted, copy=True, memory_format=torch.contiguous_format)


def _refuse_infinite(name: str, tensor: Tensor, like: Checkpoint) -> None:
    if tensor.is_floating_point() and not finite(tensor) and name not in set(like.others()):
        raise CheckpointError(f"the tensor '{name}' is not finite in {_name(tensor.dtype)}; write a wider dtype")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _into_place(temporary: Path, out: Path) -> None:
    """Give the finished folder its name; what stood there before is removed afterwards."""
    if not out.exists():
        temporary.rename(out)
    elif _exchange(temporary, out):
        shutil.rmtree(temporary, ignore_errors=True)
    else:  # no atomic exchange here: between the two renames, both folders are whole, under hidden names
        aside = temporary.with_name(temporary.name + ".old")
        out.rename(aside)
        try:
            temporary.rename(out)
        except BaseException:
            aside.rename(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux: renameat2, RENAME_EXCHANGE). False where that is not offered."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@contextmanager
def _clearly(out: Path) -> Iterator[None]:
    """Turn a failed write into one clear sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "(os error 28)" in str(error)
        if full:
            raise CheckpointError(f"the disk is full: '{out.parent}' has no room for the model") from None
        reason = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"cannot write '{out}': {reason}") from None


def bytes_of(size: int | str) -> int:
    """`5GB`, `500MB`, `2GiB` or a number -> bytes. Raises CheckpointError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|[KMB])?", str(size).strip(), re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if count < 1:
        raise CheckpointError(f"'{size}' is no shard size; write it as 5GB or 500MB")
    return count
