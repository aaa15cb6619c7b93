# SPDX-License-Identifier: Apache-2.0
"""What is written beside the weights: README.md for people, onebasin.json for machines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event
from typing import Any

import torch
import transformers

from .distance import Distances
from .folder import Checkpoint

_INTRODUCTION = {
    "match": "A functionally identical copy of the first model below, rewritten to lie close to the second.",
    "merge": "One model made of those below, after each was rewritten to lie close to the anchor.",
}


def model_card(
    inputs: Sequence[Checkpoint],
    *,
    command: str,
    result: Mapping[str, Any],
    before: Sequence[Distances] = (),
    after: Sequence[Distances] = (),
) -> str:
    """The text of README.md, with the front matter that the hub reads.

    inputs: the models, named as the user wrote them. result: what the job returns; `output` gives the title,
    `method` tells a merge from a match, `notes` are listed. before, after: distances of every rewritten model
    to the anchor, in one order.
    """
    kind = "merge" if "method" in result else "match"
    title = Path(str(result.get("output") or "")).name or f"onebasin {kind}"
    models = [model.given for model in inputs]
    lines = [
        "---",
        "library_name: transformers",
        "base_model:",
        *(f"- {json.dumps(name)}" for name in models),
    ]
    tags = ["onebasin", kind, *(["mergekit"] if "models" in result else [])]  # a merge file, see `merge_config`
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", "", f"# {title}", "", _INTRODUCTION[kind], ""]
    lines += [*(f"{number}. `{name}`" for number, name in enumerate(models)), ""]
    lines += ["Made with onebasin:", "", "```sh", command, "```", ""]
    if after:
        lines += [*_table(before, after), ""]
    if result.get("notes"):
        lines += [*(f"- {note}" for note in result["notes"]), ""]
    lines += ["`onebasin.json` holds the exact inputs, options, versions and the distances per layer.", ""]
    return "\n".join(lines)


def _table(before: Sequence[Distances], after: Sequence[Distances]) -> list[str]:
    """Distances before and after, whole and per part, as Markdown."""
    lines = ["Euclidean distance to the anchor, over the shared parameters:", ""]
    lines += ["| | before | after |", "|---|---:|---:|"]
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        source = f"source {number}, " if len(after) > 1 else ""
        lines.append(f"| {source}whole | {old.distance:.6g} | {new.distance:.6g} |")
        for part, value in old.parts.items():
            if value or new.parts[part]:
                lines.append(f"| {source}{part} | {value:.6g} | {new.parts[part]:.6g} |")
    return lines


def provenance(
    inputs: Sequence[Checkpoint],
    *,
    command: str,
    options: Mapping[str, Any],
    result: Mapping[str, Any],
    before: Sequence[Distances] = (),
    after: Sequence[Distances] = (),
    sha256: Sequence[Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """The contents of onebasin.json: what made this model, exactly, in plain JSON values.

    Models are named as the user wrote them. sha256: `hashes` of every input, where they are known already.
    """
    sha256 = [hashes(model) for model in inputs] if sha256 is None else sha256
    return {
        "command": command,
        "inputs": [{"model": model.given, "sha256": dict(found)} for model, found in zip(inputs, sha256, strict=True)],
        "options": _plain(options),
        "result": _plain(result),
        "versions": versions(),
        "distances": [{"before": asdict(old), "after": asdict(new)} for old, new in zip(before, after, strict=True)],
    }


def hashes(model: Checkpoint, stop: Event | None = None) -> dict[str, str]:
    """File name -> SHA-256, of config.json and every weight file. Reads all of them, or up to where `stop` is set."""
    files = [model.folder / "config.json", *sorted(set(model.files.values()))]
    return {file.name: _sha256(file, stop) for file in files}


def versions() -> dict[str, str]:
    """The versions that decide the numbers."""
    from onebasin import __version__  # the package is whole only when this is called

    return {
        "onebasin": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment() -> dict[str, str]:
    """What a bug report needs: versions, the machine, and what torch can compute on."""
    libraries = ("numpy", "scipy", "safetensors", "huggingface_hub", "mergekit", "peft", "matplotlib", "POT", "ray")
    found = dict(versions())
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {**found, "platform": platform.platform(), "devices": ", ".join(devices)}


def _plain(value: Any) -> Any:
    """The value with paths and collections in the forms that JSON has."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Collection):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return str(value)


def _sha256(file: Path, stop: Event | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with file.open("rb", buffering=0) as stream:
        while not (stop and stop.is_set()) and (size := stream.readinto(buffer)):
            digest.update(buffer[:size])
    return digest.hexdigest()
