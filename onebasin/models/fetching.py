# SPDX-License-Identifier: Apache-2.0
"""Find a model: in a folder, or on the hub, from which it is fetched into the hub's cache. Links may not lead out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from .errors import ModelError, one_line

_INSIDE = ("additional_chat_templates/*", "[0-9]_*/*")  # files in subfolders that are read
_BESIDES = ["*.json", "*.txt", "*.model", "*.jinja", "*.md"]  # files of a hub model besides weights


def locate(model: str | Path, *files: str) -> Path:
    """Return the local folder of a model, which is fetched from the hub into its cache if necessary.

    Args:
        model: A path, or a hub id `owner/name[@revision]`.
        files: Patterns of the files to fetch (default: weights and the files beside them).

    Raises:
        ModelError: There is neither, or a file of the folder is a link that leads out of it.
    """
    text = str(model)
    path = Path(text)
    if text and path.is_dir():
        refuse_links_out(path)
        return path
    if text and path.exists():
        if path.suffix == ".gguf":
            raise ModelError(gguf(path))
        raise ModelError(f"'{text}' is a file; give the folder with config.json and the weights")
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
        raise ModelError(f"there is no folder '{text}', and fetching it from the hub failed: {reason}") from None


_followed: set[Path] = set()  # links that `link` made


def link(place: Path, target: Path) -> None:
    """Make `place` a link to the file `target`, or a copy of it if links cannot be made.

    Unlike links that were there before, it may lead out of its folder.
    """
    try:
        place.symlink_to(target.resolve())
    except OSError:  # Windows, where not every user may create links
        shutil.copyfile(target, place)
    _followed.add(place.absolute())


def refuse_links_out(folder: Path) -> None:
    """Raise ModelError if a file of a model folder is a link to a file outside it.

    The folder may come from an untrusted source, and the contents of its files go into the output. The hub's cache
    consists of links: those that lead into it are followed, and so are those of a snapshot to the blobs beside it,
    wherever that cache is.
    """
    whole = folder.resolve()
    roots = [whole, Path(constants.HF_HUB_CACHE).resolve()]
    if whole.parent.name == "snapshots":
        roots.append(whole.parent.parent / "blobs")
    for path in (*folder.iterdir(), *(path for inside in _INSIDE for path in folder.glob(inside))):
        target = Path(os.path.realpath(path))  # `resolve` raises an error for circular links
        if not any(map(target.is_relative_to, roots)) and target.is_file() and path.absolute() not in _followed:
            raise ModelError(f"'{path}' is a link that leads out of its folder, to '{target}'; replace it by a copy of "
                             "that file")  # fmt: skip


def _fetch(model: str, *weights: str) -> Path:
    name, _, revision = model.partition("@")
    return Path(snapshot_download(name, revision=revision or None, allow_patterns=[*_BESIDES, *weights]))


def upload(folder: str | Path, repository: str) -> str:
    """Upload a model folder to `owner/name` on the hub, create it if necessary, and return its address.

    The token is that of `hf auth login` or HF_TOKEN. Raises ModelError if the hub cannot be reached or refuses.
    """
    if repository.count("/") != 1:
        raise ModelError(f"'{repository}' is not a repository on the hub; write owner/name")
    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model made with onebasin")
    except Exception as error:  # the client's own errors, and those of whichever transport it uses
        raise ModelError(f"'{folder}' is written, but its upload to '{repository}' failed: {one_line(error)}") from None
    return str(address)


# What transformers needs to read them in floating point: `dequantize()`, or this configuration at loading.
LOADED_IN_FLOAT = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
MADE_FLOAT = ("bitsandbytes", "higgs")


def quantised(name: str, config: Mapping[str, Any]) -> str:
    stated, classes = config["quantization_config"], config.get("architectures")
    method = stated.get("quant_method", "bitsandbytes") if isinstance(stated, dict) else stated
    cls = classes[0] if isinstance(classes, list) and classes else "AutoModel"
    if method in MADE_FLOAT:
        ending = ").dequantize().save_pretrained(FOLDER)"
    elif method in LOADED_IN_FLOAT:  # the original format would be the quantised one
        ending = (f", quantization_config=transformers.{LOADED_IN_FLOAT[method]}(dequantize=True))"
                  ".save_pretrained(FOLDER, save_original_format=False)")  # fmt: skip
    else:
        return f"'{name}' is quantised ({method}); give the model in floating point that it was made from"
    return (f"'{name}' is quantised ({method}); write it in floating point first: "
            f"transformers.{cls}.from_pretrained('{name}'{ending}")  # fmt: skip


def gguf(file: Path) -> str:
    # transformers then has the numbers in floating point, but refuses to save a model marked as quantised.
    return (f"'{file}' is a GGUF file; write it in floating point first (with the packages gguf and accelerate): "
            f"model = transformers.AutoModelForCausalLM.from_pretrained('{file.parent}', gguf_file='{file.name}'); "
            "model.hf_quantizer = None; vars(model.config).pop('quantization_config', None); "
            "model.save_pretrained(FOLDER)")  # fmt: skip
