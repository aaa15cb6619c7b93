# SPDX-License-Identifier: Apache-2.0
"""Where a model lies: in a folder, or in the hub's cache, into which it is fetched; no link may lead out of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from .errors import ModelError, one_line

_INSIDE = ("additional_chat_templates/*", "[0-9]_*/*")  # of the folders inside a model's, what is read
_BESIDES = ["*.json", "*.txt", "*.model", "*.jinja", "*.md"]  # what a hub model holds besides weights


def locate(model: str | Path, *files: str) -> Path:
    """The local folder of a model: a path, or a hub id `owner/name[@revision]` fetched into the hub's cache.

    files: patterns of what to fetch (default: a model's weights and what lies beside them). Raises ModelError
    where there is neither, and where a file of the folder is a link that leads out of it.
    """
    text = str(model)
    path = Path(text)
    if text and path.is_dir():
        refuse_links_out(path)
        return path
    if text and path.exists():
        if path.suffix == ".gguf":
            raise ModelError(gguf(path))
        raise ModelError(f"'{text}' is a file; give the folder that holds config.json and the weights")
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or path.parent.is_dir():
        raise ModelError(f"there is no folder '{text}' (a model on the hub is called 'owner/name')")
    try:
        if files:
            return _fetch(text, *files)
        found = _fetch(text, "model*.safetensors")
        return found if any(found.glob("model*.safetensors")) else _fetch(text, "pytorch_model*.bin")
    except LocalEntryNotFoundError:  # offline, or no connection
        reason = "it is not in the hub's cache, and the hub cannot be reached"
        fetch = f"give a folder, or fetch it first: hf download {text.partition('@')[0]}"
        raise ModelError(f"there is no folder '{text}', {reason}; {fetch}") from None
    except Exception as error:  # the client's own errors, and those of whichever transport it uses
        reason = one_line(error)
        raise ModelError(f"there is no folder '{text}', and the hub gave no such model: {reason}") from None


_followed: set[Path] = set()  # links that `link` made


def link(place: Path, target: Path) -> None:
    """Make `place` a link to the file `target`, or a copy of it where links cannot be made.

    Models may be read through it, unlike through links that are found.
    """
    try:
        place.symlink_to(target.resolve())
    except OSError:  # Windows, where only some may make links
        shutil.copyfile(target, place)
    _followed.add(place.absolute())


def refuse_links_out(folder: Path) -> None:
    """Raise ModelError, naming the file, where a file of a model folder lies elsewhere, by a link.

    Such a folder may come from anywhere, and what its files hold goes into the output. The hub's cache is made of
    links: those into it are followed, and those of a snapshot to the blobs beside it, wherever that cache lies.
    """
    whole = folder.resolve()
    roots = [whole, Path(constants.HF_HUB_CACHE).resolve()]
    if whole.parent.name == "snapshots":
        roots.append(whole.parent.parent / "blobs")
    for path in (*folder.iterdir(), *(path for inside in _INSIDE for path in folder.glob(inside))):
        target = Path(os.path.realpath(path))  # `resolve` raises where links run in a circle
        if not any(map(target.is_relative_to, roots)) and target.is_file() and path.absolute() not in _followed:
            raise ModelError(f"'{path}' is a link that leads out of its folder, to '{target}'; put a copy of the "
                                  "file in its place")  # fmt: skip


def _fetch(model: str, *weights: str) -> Path:
    name, _, revision = model.partition("@")
    return Path(snapshot_download(name, revision=revision or None, allow_patterns=[*_BESIDES, *weights]))


def gguf(file: Path) -> str:
    # transformers has the numbers in floating point by then, but saves no model that it thinks of as quantised.
    return (f"'{file}' is a GGUF file; write it in floating point first (with the packages gguf and accelerate): "
            f"model = transformers.AutoModelForCausalLM.from_pretrained('{file.parent}', gguf_file='{file.name}'); "
            "model.hf_quantizer = None; vars(model.config).pop('quantization_config', None); "
            "model.save_pretrained(FOLDER)")  # fmt: skip
