# SPDX-License-Identifier: Apache-2.0
"""The switches of mergekit-yaml in `merge`: some are renamed, some have no effect and give a note, some are refused."""

from __future__ import annotations

from collections.abc import Sequence

RENAMED = {"--random-seed": "--seed", "--num-threads": "--workers", "-j": "--workers"}
INSTEAD = {"--cuda": ["--device", "cuda"], "--gpu-rich": ["--device", "cuda"]}
IDLE = {
    "--lazy-unpickle": "weights are always read tensor by tensor",
    "--low-cpu-memory": "weights are always read tensor by tensor",
    "--read-to-gpu": "weights are always read tensor by tensor",
    "--async-write": "tensors are always written while others are computed",
    "--clone-tensors": "tensors are always copied where that is needed",
    "--safe-serialization": "the output is always safetensors",
    "--multi-gpu": "only one device is used",
}
IDLE |= {f"--no-{name[2:]}": why for name, why in IDLE.items() if name != "--safe-serialization"}
USUAL = ("--no-cuda", "--no-allow-crimes", "--no-trust-remote-code", "--no-unsafe-truncate-embeddings", "--no-quiet")
IDLE |= dict.fromkeys(USUAL, "this is always so")
IDLE_WITH_VALUE = {
    "--write-threads": "tensors are always written while others are computed",
    "--lora-merge-cache": "adapters are merged in a temporary folder",
}
IMPOSSIBLE = {
    "--allow-crimes": "models of different architectures cannot be merged",
    "--trust-remote-code": "code in a model's repository is never run; register its class, and use Python",
    "--unsafe-truncate-embeddings": "choose the vocabulary with --tokenizer-source",
    "--no-safe-serialization": "the output is always safetensors, which runs no code when it is read",
    "--lora-merge-dtype": "adapters are merged in float32; --dtype is the type of the output",
    "--transformers-cache": "set the environment variable HF_HUB_CACHE",
}


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate the words of a command line to this program's options; also return notes on those without effect.

    Raises:
        ValueError: a switch is not supported.
    """
    found: list[str] = []
    notes: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left], notes
        name, equals, value = word.partition("=")
        if name in IMPOSSIBLE:
            raise ValueError(f"{name} of mergekit-yaml is not supported: {IMPOSSIBLE[name]}")
        if name in RENAMED:
            found.append(f"{RENAMED[name]}{equals}{value}")
        elif name in INSTEAD:
            found += INSTEAD[name]
        elif name in IDLE or name in IDLE_WITH_VALUE:
            if name in IDLE_WITH_VALUE and not equals and left:
                left.pop(0)
            notes.append(f"{name} has no effect: {IDLE.get(name) or IDLE_WITH_VALUE[name]}")
        else:
            found.append(word)
    return found, notes
