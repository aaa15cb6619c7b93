# SPDX-License-Identifier: Apache-2.0
"""Files written beside the weights: README.md for people, onebasin.json for machines."""

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
from .folder import Folder
from .published import block, code, plain, prose, public_name, without_paths

_MATCHED = "The first model below, rewritten to lie close to the second by changes that its function does not see"


def model_card(
    inputs: Sequence[Folder],
    *,
    command: str,
    result: Mapping[str, Any],
    before: Sequence[Distances] = (),
    after: Sequence[Distances] = (),
) -> str:
    """Return the text of README.md, with the front matter that the hub reads.

    Args:
        inputs: The models. Their names are published, not their paths.
        command: The command line that made the model.
        result: As the job returns it: `output` gives the title, only a merge has a `method`, and `notes` are listed.
        before: The distance of every model but the anchor to it, before matching.
        after: The same after matching, in the same order.
    """
    kind = "merge" if "method" in result else "match"
    known, names = paths_of(inputs), [public_name(model.name) for model in inputs]
    title = Path(str(result.get("output") or "")).name or f"onebasin {kind}"
    tags = ["onebasin", kind, *(["mergekit"] if "models" in result else [])]  # a merge file, see `merge_config`
    lines = [*front_matter(names, tags), f"# {prose(title)}", "", _introduction(kind, result), ""]
    lines += [*(f"{number}. {code(name)}" for number, name in enumerate(names)), ""]
    lines += ["Made with onebasin:", "", *block(without_paths(command, known), "sh"), ""]
    if after:
        lines += [*_table(before, after, result.get("match") != "none"), ""]
    if result.get("notes"):
        lines += [*(f"- {prose(note)}" for note in without_paths(result["notes"], known)), ""]
    lines += ["`onebasin.json` holds the inputs' hashes, options, versions and the distances per layer.", ""]
    return "\n".join(lines)


def front_matter(names: Sequence[str], tags: Sequence[str]) -> list[str]:
    """Return the lines that the hub reads. A JSON string of printable characters is a YAML string, too."""
    models = [f"- {json.dumps(plain(name), ensure_ascii=False)}" for name in names]
    return ["---", "library_name: transformers", "base_model:", *models, "tags:", *(f"- {tag}" for tag in tags), "---",
            ""]  # fmt: skip


def paths_of(inputs: Sequence[Folder]) -> list[str]:
    """Return the paths of the models, which are not published."""
    return [place for model in inputs for place in (model.name, str(model.folder))]


def _introduction(kind: str, result: Mapping[str, Any]) -> str:
    """Return sentences about what was done."""
    if kind == "match":
        compared = result.get("max_output_difference")
        if compared is None:
            return f"{_MATCHED}. Their outputs were not compared."
        return f"{_MATCHED}: on random inputs, its outputs differ by at most {compared:.3g}."
    made = f"One model made of those below by the method {code(str(result['method']))}"
    if result.get("match") == "none":
        return f"{made}. They were not matched first."
    return f"{made}, after all but the anchor were rewritten to lie close to it."


def _table(before: Sequence[Distances], after: Sequence[Distances], matched: bool) -> list[str]:
    """Return the distances before and after matching, in total and per part, as Markdown; a single column of them if
    nothing was matched."""
    lines = ["Euclidean distance to the anchor, over the shared parameters:", ""]
    lines += ["| | before | after |", "|---|---:|---:|"] if matched else ["| | distance |", "|---|---:|"]
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        source = f"source {number}, " if len(after) > 1 else ""
        rows = {"whole": (old.distance, new.distance)}
        rows |= {part: (value, new.parts[part]) for part, value in old.parts.items() if value or new.parts[part]}
        for part, (first, second) in rows.items():
            lines.append(f"| {source}{prose(part)} | {first:.6g} |" + (f" {second:.6g} |" if matched else ""))
    return lines


def provenance(
    inputs: Sequence[Folder],
    *,
    command: str,
    options: Mapping[str, Any],
    result: Mapping[str, Any],
    before: Sequence[Distances] = (),
    after: Sequence[Distances] = (),
    sha256: Sequence[Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the contents of onebasin.json, in plain JSON values: exactly how this model was made.

    Models and files are named without their paths, since the file is published with the model.

    before, after: distances, as in `model_card`. sha256: `hashes` of every input, if they are known already.
    """
    sha256 = [hashes(model) for model in inputs] if sha256 is None else sha256
    named = zip(map(public_name, (model.name for model in inputs)), sha256, strict=True)
    facts = {
        "command": command,
        "inputs": [{"model": name, "sha256": dict(found)} for name, found in named],
        "options": _plain(options),
        "result": _plain(result),
        "versions": versions(),
        "distances": [{"before": asdict(old), "after": asdict(new)} for old, new in zip(before, after, strict=True)],
    }
    cleared: dict[str, Any] = without_paths(facts, paths_of(inputs))
    return cleared


def hashes(model: Folder, stop: Event | None = None) -> dict[str, str]:
    """Return file name -> SHA-256 of config.json and every weight file. Reading ends early once `stop` is set."""
    files = [model.folder / "config.json", *sorted(set(model.files.values()))]
    return {file.name: _sha256(file, stop) for file in files}


def versions() -> dict[str, str]:
    """Return the versions on which the numbers depend."""
    from onebasin import __version__  # not yet defined when this module is imported

    return {
        "onebasin": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment() -> dict[str, str]:
    """Return the facts that a bug report needs: versions, the machine, and torch's devices."""
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
    """Return the value with paths and collections turned into JSON values."""
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
