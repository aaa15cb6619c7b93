# SPDX-License-Identifier: Apache-2.0
"""Writing a model folder: shard by shard into a hidden folder beside it, which is moved into place at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.engine import Placing
from onebasin.settings import OutputSettings

from .companions import copy_companions
from .errors import ModelError
from .model import Model
from .outputs import Output, model_folder, refuse_outputs
from .published import public_name
from .weight_files import CannotWrite, Target, clearly, name_of, write_weights

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"K": 10**3, "M": 10**6, "B": 10**9}  # as mergekit writes them


def write_model(
    out: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    like: Model,
    look: OutputSettings | None = None,
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the folder `out`: weights from `tensors`, everything else from `like` and its folder.

    The folder appears complete or not at all. A failure removes what was written; a killed process leaves at most a
    hidden folder beside `out`, which the next run with this output removes.

    Args:
        out: The folder.
        tensors: (name on disk, tensor) pairs, consumed lazily; two or three are in memory at a time. `LazyTensors` with
            a cluster are computed and written by its tasks, one per file, with the same bytes.
        like: The model whose config and other files are copied.
        look: The size of the weight files, and the files beside them.
        overwrite: Replace an existing model folder.
        dtype: Of all floating-point tensors; None keeps the dtype that `like` has under each name.

    Raises:
        ModelError: The output exists, is not a model folder or is an input; a tensor is not finite in its dtype; the
            disk is full.
    """
    with appearing(out, overwrite, [like.origin.folder]) as hidden:
        write_into(Target(hidden, Path(out), like, dtype), tensors, look)


def write_into(target: Target, tensors: Iterable[tuple[str, Tensor]], look: OutputSettings | None = None) -> None:
    """Write the files of `write_model` into a hidden folder, which the caller moves into place.

    Args:
        target: The folder, its final place, the model whose other files are copied, and the dtype of the tensors.
        tensors: As in `write_model`.
        look: As in `write_model`.

    Raises:
        ModelError: As `write_model` does for tensors and a full disk.
    """
    look = look or OutputSettings()
    limit = bytes_of(look.shard_size)
    with clearly(target.out):
        _companions(target, look.copy_tokenizer)
    write_weights(target, tensors, limit)
    with clearly(target.out):
        for name, text in look.files.items():
            (target.folder / name).write_text(text, "utf-8")


@contextmanager
def appearing(out: str | Path, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which is moved into place when the block ends, and removed if it fails.

    inputs: folders that must not be overwritten.

    Raises:
        ModelError: As in `write_model`.
    """
    refuse_outputs([Output("the output", out)], inputs, overwrite)
    with Placing(raised=CannotWrite) as placing:
        yield model_folder(placing, Path(out), overwrite)


def _companions(target: Target, tokenizer: bool) -> None:
    copy_companions(target.like.origin.folder, target.folder, tokenizer)
    config = dict(target.like.raw_config)
    if isinstance(origin := config.get("_name_or_path"), str):  # as older versions of transformers wrote it
        config["_name_or_path"] = public_name(origin)
    if target.dtype is not None:
        name = name_of(target.dtype)
        config = _with_dtype(config, name)
        if not {"dtype", "torch_dtype"} & config.keys():
            config["torch_dtype"] = name  # the older key: every version of transformers reads it
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (target.folder / "config.json").write_text(text, "utf-8")


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config with `name` wherever it states a dtype, also in the configs of its components."""
    return {
        key: name
        if key in ("dtype", "torch_dtype")
        else _with_dtype(value, name)
        if isinstance(value, dict) and key.endswith("_config")
        else value
        for key, value in config.items()
    }


def bytes_of(size: int | str) -> int:
    """`5GB`, `500MB`, `2GiB` or a number -> bytes. Raises ModelError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|[KMB])?", str(size).strip(), re.IGNORECASE)
    count = float(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0
    if not 1 <= count < 2**63:
        raise ModelError(f"'{size}' is not a shard size; write it as 5GB or 500MB")
    return int(count)
