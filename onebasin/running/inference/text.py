# SPDX-License-Identifier: Apache-2.0
"""The table of a traced twin, as a person would write it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from onebasin.symmetry.inference.writing.draft import Draft, Style
from onebasin.symmetry.inference.writing.table import drafted, hold_named, text_of

from .disk import on_disk
from .sizes import key_of_size, list_of_layers, scope_of
from .tracing import Traced, as_before, kind_of


class Unalike(Exception):
    """Two twins write a space so differently that its size in the other is not known."""


def table_text(
    found: Traced,
    style: Style,
    larger: Traced | None = None,
    by_name: bool = False,
    strict: bool = False,
    still: tuple[frozenset[str], ...] = (),
) -> str:
    """Return the table of a traced twin.

    Args:
        found: The twin.
        style: What to state about constants.
        larger: Another twin, to tell sizes apart that agree in one. It is only run if that is needed.
        by_name: Whether to list layers that differ by name.
        strict: Whether to raise an error instead of fixing a space of which the twins write no tensor alike.
        still: Spaces that are fixed because no key gives their sizes, one set per attempt, each with the names of that
            attempt.

    Raises:
        Unalike: There is such a space.
    """
    draft, ignored = _draft(found, style, by_name, still[-1:])
    model = found.model

    @cache
    def both() -> list[tuple[Mapping[str, int], dict[str, Any]]]:
        here = (draft.sizes, model.config.to_dict())
        if larger is None:
            return [here]
        with as_before(larger.ran):
            sizes = sizes_in(_draft(larger.ran, style, by_name, still)[0], draft)
        return [here, (sizes, larger.model.config.to_dict())]

    def is_in_both(name: str) -> bool:
        return all(name in sizes for sizes, _ in both())

    def key_of(name: str) -> str | None:
        if not is_in_both(name):  # nothing tells its size from what agrees with it by chance
            return None
        sizes, configs = zip(*((sizes[name], config) for sizes, config in both()), strict=True)
        return key_of_size(name, sizes, configs, scope_of(model, draft.parameters(name)))

    def list_of(kinds: Sequence[str]) -> tuple[str, Sequence[str]] | None:
        return list_of_layers(kinds, model.config.to_dict())

    text, unsized = text_of(draft, model.config.model_type, key_of, list_of, ignored)
    if moving := [place.name for place in draft.places if place.name in unsized and place.moves]:
        if strict and not all(map(is_in_both, moving)):
            raise Unalike
        return table_text(found, style, larger, by_name, strict, (*still, unsized))
    return text


def _draft(
    found: Traced, style: Style, by_name: bool = False, still: tuple[frozenset[str], ...] = ()
) -> tuple[Draft, list[str]]:
    """Return the draft of the table of a traced model, and patterns of the tensors in its files that are not
    parameters."""
    model = found.model
    entries = on_disk(found)
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    outside = [name for name in found.file if not name.startswith(prefix)]
    layers = {match[1]: match[2] for name in outside if (match := re.match(r"((.*?)\.\d+)\.", name))}
    blocks = Counter(layers.values())
    if not outside or len(outside) == len(found.file) or any(count > 1 for count in blocks.values()):
        prefix = ""
    ignored = sorted({re.sub(r"\.\d+\.", ".{}.", name.removeprefix(prefix)) for name in found.constants})

    labels = getattr(model.config, "num_labels", 0)
    draft = drafted(found.trace, entries, prefix, style, by_name, labels)
    for names in still:
        hold_named(draft, names)
        draft = drafted(found.trace, entries, prefix, style, by_name, labels)
    return draft, ignored


def sizes_in(other: Draft, draft: Draft) -> dict[str, int]:
    """Return the sizes that the spaces of a draft have in another, by the tensors that both write alike."""
    there = {(line.heading, line.name): line.axes for line in other.lines}
    found: dict[str, set[int | None]] = defaultdict(set)
    for line in draft.lines:
        mine, its = (re.split(r"([A-Za-z_]\w*)", axes.replace("'", "")) for axes in
                     (line.axes, there.get((line.heading, line.name), "")))  # fmt: skip
        if mine[::2] == its[::2]:
            for name, same in zip(mine[1::2], its[1::2], strict=True):
                found[name].add(other.sizes.get(same))
    return {name: size for name, sizes in found.items() if len(sizes) == 1 and (size := next(iter(sizes))) is not None}


def with_fixed(text: str, names: Mapping[str, float]) -> str:
    """Return a table in which these spaces are fixed; a factor, which has no size of its own, gets one."""
    for name in names:
        if re.search(rf"(?m)^    {name} factor(?= |$)", text):
            text = re.sub(r"(?m)^(types .*)$", rf"\1\nsize {name} = 1", text, count=1)
        text = re.sub(rf"(?m)^(    {name}) (?:(?:pair|next) \w+|\w+)(?= |$)", r"\1 fixed", text)
    return text


def with_note(text: str, roles: Collection[str], note: str) -> str:
    """Return a table with one more note on the tensors of some names (without numbers)."""
    lines, heading = list[str](), None
    for line in text.split("\n"):
        if line.startswith("layer "):
            heading = line.removeprefix("layer ") + "."
        elif line and not line.startswith(" "):
            heading = "" if line in ("tensors", "heads") else None
        elif line and heading is not None and kind_of(heading + line.split()[0].rstrip("?")) in roles:
            line += f" ; {note}"
        lines.append(line)
    return "\n".join(lines)
