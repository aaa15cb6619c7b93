# SPDX-License-Identifier: Apache-2.0
"""Facts about two models that need no weights: from configs, tensor headers and vocabularies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.repocard import metadata_load

from onebasin.symmetry import Signature, acting_groups
from onebasin.symmetry.gauge.canonical import plan
from onebasin.symmetry.gauge.widening import widening

from .errors import ModelError, one_line, read_json
from .folder import Folder
from .model import View
from .pairing import read_pair, shared_roles


@dataclass(frozen=True)
class Vocabulary:
    """size_a, size_b: numbers of tokens. agreeing: the number of ids with the same token in both. first: the first
    other ids, with their tokens (None if there is none)."""

    size_a: int
    size_b: int
    agreeing: int
    first: list[tuple[int, str | None, str | None]]

    @property
    def same(self) -> bool:
        return not self.first


@dataclass(frozen=True)
class Preflight:
    """Facts that are known before matching.

    reason: why the models cannot be matched; None if they can, and only then are the other fields filled. signature:
    of the source as matching will see it. roles: the tensors that matching compares. moves: space -> group. fixed:
    spaces on which no group acts. rows: positions -> their numbers, where these differ. heads: tensors of different
    tasks. only_a, only_b: tensors that the other lacks. widened: space -> (narrow, wide). untied: tensors that will no
    longer be tied.
    """

    reason: str | None
    signature: Signature | None = None
    roles: tuple[str, ...] = ()
    moves: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    widened: dict[str, tuple[int, int]] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)


def preflight(a: Folder, b: Folder, level: str = "paper", canonical: bool = False) -> Preflight:
    """Find out whether `a` can be matched to `b` at a level of symmetry, and what would move. Reads no weights.

    canonical: whether the level works on canonical forms.

    Raises:
        ModelError: A folder cannot be read. Models that cannot be matched are not an error.
        ValueError: The level is unknown.
    """
    for model in (a, b):
        assert model.config and model.shapes  # raises ModelError for a damaged folder
    try:
        assert a.signature and b.signature
    except ValueError as error:  # unknown type, or tensors that do not fit the table
        return Preflight(str(error))
    source, anchor, untied = a.signature, b.signature, []
    widened: dict[str, tuple[int, int]] = {}
    if canonical:
        form = plan(source)
        source, anchor, untied = form.signature, plan(anchor).signature, form.untied
    groups = acting_groups(source, level, rescale="joint")
    try:
        if canonical and source.family == anchor.family:
            widened = widening(source, anchor)
        if widened:
            kept = {role: entry for role, entry in anchor.tensors.items() if role in source.tensors}
            source = replace(anchor, tensors=kept)
        shared = shared_roles(View(a, source), View(b, anchor))
    except ValueError as error:
        return Preflight(str(error))
    touched = {leaf.space for role in shared.roles for leaf in source.leaves(source.tensors[role])}
    spaces = [key for key in source.spaces if key in touched]
    groups = acting_groups(source, level, rescale="joint") if widened else groups
    moving = dict.fromkeys(source.root[key] for key in spaces if source.root[key] in groups)
    moves = {source.spaces[root].name: groups[root].name for root in moving}
    fixed = dict.fromkeys(source.spaces[key].name for key in spaces if source.root[key] not in groups)
    rows = {
        space.name: (space.size, anchor.spaces[key].size)
        for key, space in source.spaces.items()
        if space.kind == "rows" and key in anchor.spaces and space.size != anchor.spaces[key].size
    }
    return Preflight(
        None,
        source,
        shared.roles,
        moves,
        list(fixed),
        rows,
        shared.differing,
        shared.only_a,
        shared.only_b,
        widened,
        untied,
    )


# --- vocabularies ---------------------------------------------------------------------------------------------


def vocabulary(a: Folder, b: Folder, shown: int = 5) -> Vocabulary | None:
    """Compare the vocabularies of two folders id by id; return None if one of them has none that can be read.

    shown: how many of the differing tokens to list.

    Raises:
        ModelError: A vocabulary is damaged.
    """
    mine, theirs = tokens(a.folder), tokens(b.folder)
    if mine is None or theirs is None:
        return None
    ids = sorted(mine.keys() | theirs.keys())
    differing = [i for i in ids if mine.get(i) != theirs.get(i)]
    first = [(i, mine.get(i), theirs.get(i)) for i in differing[:shown]]
    return Vocabulary(len(mine), len(theirs), len(ids) - len(differing), first)


def tokens(folder: Path) -> dict[int, str] | None:
    """Return id -> token, from the first of tokenizer.json, vocab.json and vocab.txt that exists."""
    whole, words, lines = (folder / name for name in ("tokenizer.json", "vocab.json", "vocab.txt"))
    if whole.is_file():
        read = read_json(whole)
        model, added = (read.get(key) for key in ("model", "added_tokens")) if isinstance(read, dict) else (None, None)
        found = _by_id(model.get("vocab")) if isinstance(model, dict) else {}
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and isinstance(token.get("id"), int):
                found[token["id"]] = str(token.get("content"))
        return found or None
    if words.is_file():
        extra = folder / "added_tokens.json"
        return _by_id(read_json(words)) | (_by_id(read_json(extra)) if extra.is_file() else {}) or None
    if lines.is_file():
        try:
            text = lines.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"'{lines}' cannot be read as text: {one_line(error)}") from None
        return dict(enumerate(text.removesuffix("\n").split("\n"))) if text else None
    return None


def _by_id(vocab: Any) -> dict[int, str]:
    """From {token: id}, or a list of [token, score]."""
    if isinstance(vocab, dict):
        return {number: token for token, number in vocab.items() if isinstance(number, int)}
    if isinstance(vocab, list):
        return {i: str(item[0]) for i, item in enumerate(vocab) if isinstance(item, list) and item}
    return {}


# --- ancestry -------------------------------------------------------------------------------------------------


def ancestors(model: Folder) -> list[str]:
    """Return the models that a folder claims to come from: `_name_or_path` in its config, `base_model` in README.md."""
    names = [model.raw_config.get("_name_or_path")]
    card = model.folder / "README.md"
    if card.is_file():
        try:
            base = (metadata_load(card) or {}).get("base_model")
        except Exception:  # written by people: it may contain anything
            base = None
        names += base if isinstance(base, list) else [base]
    return list(dict.fromkeys(name.rstrip("/") for name in names if isinstance(name, str) and name.strip("/")))


def peek(a: Folder, b: Folder, found: Preflight) -> tuple[str, float] | None:
    """Return the name of the smallest weight matrix inside the blocks that both models share, and its cosine.

    Near 1: one base. Near 0: trained apart, or rewritten. None if there is no such matrix. Biases, norms and embeddings
    are not compared, since they agree between unrelated models, nor are matrices of zeros, which have no direction.
    """
    signature = a.signature
    inside = [
        role
        for role in found.roles
        if role in signature.tensors and signature.part(signature.tensors[role]) in ("attention", "ffn")
        and len(signature.tensors[role].axes) > 1 and signature.tensors[role].norm is None
        and b.signature.tensors[role].shape == signature.tensors[role].shape
    ]  # fmt: skip
    for role in sorted(inside, key=lambda role: prod(signature.tensors[role].shape)):
        x, y = (tensor.flatten() for tensor in read_pair(a, b, role, torch.float64))
        if x.any() and y.any():
            return signature.tensors[role].name, float((x / x.norm()) @ (y / y.norm()))
    return None
