# SPDX-License-Identifier: Apache-2.0
"""Models with different vocabularies: refused, or rewritten with one vocabulary before they are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from onebasin.symmetry import Signature

from .companions import TOKENIZER
from .errors import ModelError, one_line
from .folder import Folder
from .model import Model, View
from .preflight import tokens, vocabulary
from .views import Rewritten
from .writer import write_model

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def refuse_other_vocabularies(models: Sequence[Folder]) -> None:
    """Raise ModelError, with the counts and the first tokens that differ, unless all share one vocabulary.

    A folder without a vocabulary is not checked.
    """
    known = [model for model in models if tokens(model.folder) is not None]
    for model in known[1:]:
        found = vocabulary(known[0], model, shown=3)
        if found is not None and not found.same:
            first = ", ".join(f"{i} {one!r} / {two!r}" for i, one, two in found.first)
            raise ModelError(
                f"the vocabularies differ: '{known[0].name}' has {found.size_a} tokens, '{model.name}' "
                f"{found.size_b}, and {found.agreeing} ids agree; the first that do not: {first}; choose a tokenizer "
                "with --tokenizer-source (union, base or one of the models)"
            )


@dataclass(frozen=True)
class Unified:
    """Folders with the new vocabulary. present: which rows each had before (models, tokens); the others are 0."""

    folders: list[Path]
    present: Tensor
    base: int

    def filled(self, models: Sequence[Model], dtype: torch.dtype) -> list[Model]:
        """Return the models with rows for the tokens that they lacked: the base model's, else the mean of the others.

        Call this with models in one frame: otherwise, rows of different models have nothing in common.
        """
        return [Rewritten(model, _Filling(self, models, i), dtype) for i, model in enumerate(models)]


@dataclass(frozen=True)
class _Filling:
    """Fills in the rows that model `number` lacks, from all models."""

    unified: Unified
    models: Sequence[Model]
    number: int

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        dim, have = vocabulary_axis(signature, role), self.unified.present
        if dim is None or bool(have[self.number].all()):
            return tensor
        read = (model.read(role, tensor.dtype, str(tensor.device)) for model in self.models)
        rows = torch.stack([each.movedim(dim, 0) for each in read])
        counted = have.to(rows).reshape(*have.shape, *[1] * (rows.ndim - 2))
        default = (rows * counted).sum(0) / counted.sum(0).clamp(min=1)
        default = torch.where(counted[self.unified.base] > 0, rows[self.unified.base], default)
        return torch.where(counted[self.number] > 0, rows[self.number], default).movedim(0, dim)


def unify(models: Sequence[Folder], source: str | int, base: int, scratch: Path) -> Unified:
    """Write every model into `scratch` with one vocabulary.

    Rows of tokens that a model lacks are 0. A model without a tokenizer is assumed to have the base model's.

    Args:
        models: The folders.
        source: `union` (the base model's tokens, then the additional ones of the others, as added tokens), `base`, or
            the number of a model.
        base: The number of the base model.
        scratch: An existing folder.

    Raises:
        ModelError: No tokenizer can be read.
    """
    tokenizers = [_tokenizer(model) for model in models]
    chosen = base if isinstance(source, str) else source
    tokenizer = tokenizers[chosen] or tokenizers[base]
    if tokenizer is None:
        raise ModelError(f"'{models[chosen].name}' has no tokenizer to take the tokens from")
    own = [(each or tokenizers[base] or tokenizer).get_vocab() for each in tokenizers]
    if source == "union":
        tokenizer.add_tokens(list(_added(tokenizer.get_vocab(), [each for each in tokenizers if each])))
    wanted: dict[str, int] = tokenizer.get_vocab()
    tokenizer.save_pretrained(scratch / "tokenizer")
    written = {path.name: path for path in (scratch / "tokenizer").iterdir()}
    ids = {key: models[chosen].raw_config[key] for key in _IDS if key in models[chosen].raw_config}
    folders, present = [], torch.zeros(len(models), max(wanted.values()) + 1, dtype=torch.bool)
    for number, model in enumerate(models):
        rows = torch.full((present.shape[1],), -1)
        size = model.raw_config.get("vocab_size", len(own[number]))
        for token, row in wanted.items():
            if 0 <= (old := own[number].get(token, -1)) < size:
                rows[row] = old
        present[number] = rows >= 0
        folders.append(scratch / f"vocabulary-{number}")
        updates = {"vocab_size": len(rows), **ids}
        write_model(folders[-1], _with_rows(model, rows), View(model, updates=updates))
        _replace_tokenizer(written, folders[-1])
    return Unified(folders, present, base)


def vocabulary_axis(signature: Signature, role: str) -> int | None:
    """Return the axis of a tensor that is indexed by tokens, if any."""
    for dim, axis in enumerate(signature.tensors[role].axes):
        space = signature.spaces.get(getattr(axis, "space", ""))
        if space is not None and space.name == "vocab":
            return dim
    return None


def _tokenizer(model: Folder) -> Any:
    if not any(path for pattern in TOKENIZER for path in model.folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False)
    except Exception as error:  # every tokenizer class refuses in its own way
        raise ModelError(f"the tokenizer of '{model.name}' cannot be read: {one_line(error)}") from None


def _added(known: Mapping[str, int], tokenizers: Sequence[Any]) -> Iterator[Any]:
    """Yield the tokens of other tokenizers that a vocabulary lacks, in the order of their ids."""
    seen = set(known)
    for tokenizer in tokenizers:
        special = tokenizer.added_tokens_decoder
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
            if token not in seen:
                seen.add(token)
                yield special.get(number, token)


def _with_rows(model: Folder, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    for role, entry in model.signature.tensors.items():
        tensor = model.read(role, model.dtypes.get(entry.names[0], torch.float32))
        dim = vocabulary_axis(model.signature, role)
        if dim is not None:
            tensor = tensor.index_select(dim, rows.clamp(min=0)).movedim(dim, 0)
            tensor[rows < 0] = 0
            tensor = tensor.movedim(0, dim)
        yield from entry.split(tensor)


def _replace_tokenizer(written: Mapping[str, Path], folder: Path) -> None:
    for pattern in TOKENIZER:
        for path in folder.glob(pattern):
            path.unlink()
    for name, path in written.items():
        if path.is_file():
            (folder / name).write_bytes(path.read_bytes())
