# SPDX-License-Identifier: Apache-2.0
"""The files of a model folder besides weights and config.json."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

# Code (*.py) and pickled weights are never copied.
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
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",  # of sentence-transformers, and
    *(f"[0-9]_*/{name}" for name in ("config.json", "model.safetensors")),  # its modules after the model (pooling)
    "LICENSE*", "NOTICE*",
)  # fmt: skip


def companions(folder: Path, tokenizer: bool = True) -> Iterator[Path]:
    """Yield the files beside the weights and config.json. tokenizer: whether to include the tokenizer's."""
    for pattern in COMPANIONS:
        if tokenizer or pattern not in TOKENIZER:
            yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def copy_companions(source: Path, folder: Path, tokenizer: bool = True) -> None:
    """Copy the files of a model folder besides weights and config.json; files that exist already are kept."""
    for path in companions(source, tokenizer):
        target = folder / path.relative_to(source)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
