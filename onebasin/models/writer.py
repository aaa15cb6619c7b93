# SPDX-License-Identifier: Apache-2.0
"""Writing a model folder: shard by shard into a hidden sibling folder, which takes its place at the end."""

from __future__ import annotations

import ctypes
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
from torch import Tensor

from onebasin.engine import discard, missing_parents

from .folder import CheckpointError
from .model import Model
from .published import public_name
from .weight_files import Target, clearly, name_of, write_weights

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
    like: Model,
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    files: Mapping[str, str] | None = None,
    check: Callable[[Path], object] | None = None,
    inputs: Iterable[str | Path] = (),
    tokenizer: bool = True,
) -> None:
    """Write the folder `out`: weights from `tensors`, everything else from `like` and its folder.

    tensors: (name on disk, tensor) pairs, consumed lazily; two or three are in memory at a time. Those of a `Making`
    with a cluster are made and written by its tasks, a file each, with the same bytes.
    dtype: of all floating-point tensors; None keeps what `like` stores under each name.
    files: name -> text, written beside the weights.
    check: called with the finished folder before anyone sees it; what it raises refuses the folder.
    inputs: folders that must not be overwritten, besides `like`. tokenizer: whether its files are copied, too.

    The folder appears whole or not at all. A failure removes what was written; a killed process leaves at
    most a hidden folder beside `out`. Raises CheckpointError for an output that exists, is no model folder or
    is an input, for a tensor that is not finite in its dtype, and for a full disk.
    """
    limit = bytes_of(shard_size)
    with appearing(out, overwrite, [like.origin.folder, *map(Path, inputs)]) as temporary:
        with clearly(Path(out)):
            _companions(temporary, like, dtype, tokenizer)
        write_weights(Target(temporary, Path(out), like, dtype), tensors, limit)
        with clearly(Path(out)):
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
        with clearly(out):
            temporary.mkdir(parents=True)
        yield temporary
        with clearly(out):
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


def _companions(folder: Path, like: Model, dtype: torch.dtype | None, tokenizer: bool) -> None:
    copy_companions(like.origin.folder, folder, tokenizer)
    config = dict(like.raw_config)
    if isinstance(origin := config.get("_name_or_path"), str):  # as older versions of transformers wrote it
        config["_name_or_path"] = public_name(origin)
    if dtype is not None:
        name = name_of(dtype)
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


def bytes_of(size: int | str) -> int:
    """`5GB`, `500MB`, `2GiB` or a number -> bytes. Raises CheckpointError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|[KMB])?", str(size).strip(), re.IGNORECASE)
    count = float(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0
    if not 1 <= count < 2**63:
        raise CheckpointError(f"'{size}' is no shard size; write it as 5GB or 500MB")
    return int(count)
