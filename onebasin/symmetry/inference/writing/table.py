# SPDX-License-Identifier: Apache-2.0
"""The steps from a trace to a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from ..atoms import fix
from ..trace import Trace
from .batches import find_batches
from .draft import Draft, Found, Line, Style
from .layers import find_spaces, orient
from .lines import lines_of
from .names import name_spaces
from .ordering import by_run, follow
from .settling import settle, settle_parts
from .spaces import ListOf, declarations, stated_sizes


def drafted(
    trace: Trace, found: Sequence[Found], prefix: str, style: Style, by_name: bool = False, labels: int = 0
) -> Draft:
    """Return the draft of a table, with its spaces and the lines of its tensors.

    Args:
        trace: The record of a run; its axes are restricted further.
        found: The tensors in a file.
        prefix: What the names of all tensors but those of heads begin with.
        style: What to state about constants.
        by_name: List layers that differ by name; otherwise, tensors that differ are fixed.
        labels: The number of classes in the configuration.
    """
    draft = Draft(trace, list(found), prefix, style, by_name, labels)
    by_run(draft)
    settle(draft)
    for norm in trace.norms:
        follow(draft, norm)
    find_spaces(draft)
    settle_parts(draft)
    orient(draft)
    find_batches(draft)
    name_spaces(draft)
    draft.sizes |= {place.name: place.size for place in draft.places}
    draft.lines = list(lines_of(draft))
    return draft


def hold_named(draft: Draft, names: Collection[str]) -> None:
    """Fix these spaces in the trace, for the next draft."""
    for place in draft.places:
        if place.name in names:
            for axis in place.atoms:
                fix(axis, "its size is not told")


def text_of(
    draft: Draft,
    family: str,
    key_of: Callable[[str], str | None],
    list_of: ListOf,
    ignored: Sequence[str],
) -> tuple[str, frozenset[str]]:
    """Return the table, and the spaces whose sizes nothing gives.

    Args:
        draft: What to write.
        family: The name of the table, and the model type that it describes.
        key_of: Name of a space -> the expression for its size in configurations.
        list_of: The kinds of all layers -> the list of a configuration whose items distinguish these, and the items.
        ignored: Patterns of buffers.
    """
    stated, unsized = stated_sizes(draft, key_of)
    out = [f"family {family}", f"types {family}"]
    out += [f"prefix {draft.prefix}"] if draft.prefix else []
    out += [f"size {name} = {key}" for name, key in stated]
    out += [f"ignore {' '.join(ignored)}"] if ignored else []
    out += ["", "spaces", *(f"    {line}" for line in declarations(draft, list_of))]
    out += [*_tensors(draft), *_unused(draft)]
    return "\n".join(out) + "\n", unsized


def _tensors(draft: Draft) -> Iterator[str]:
    """Yield the sections of tensors: blocks in the order of their first tensors, and heads last."""
    first: dict[str, int] = {}
    for line in draft.lines:
        if line.heading:
            first.setdefault(line.heading, line.order)
    rank = _ranks(draft)

    def key(line: Line) -> tuple[bool, int, int]:
        return line.head, first.get(line.heading, line.order), rank.get(line.order, line.order)

    section = None
    for line in sorted(draft.lines, key=key):
        here = f"layer {line.heading}.{{}}" if line.heading else "heads" if line.head else "tensors"
        if here != section:
            yield from ("", here)
            section = here
        name = line.name
        if here == "heads" and any(one.name == draft.prefix + name.rstrip("?") for one in draft.found):
            name = draft.prefix + name
        yield f"    {name}  {line.axes}" + (f"  ; {line.notes}" if line.notes else "")


def _ranks(draft: Draft) -> dict[int, int]:
    """Return the rank of each tensor in its block, by the place of its first occurrence: an order that is valid for
    all layers, whichever of the tensors they have."""
    merged: dict[str, list[str]] = defaultdict(list)
    after: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, str], int] = {}
    for place, one in enumerate(draft.found):
        heading, layer, rest = draft.parsed(one)
        if not heading:
            continue
        order, at = merged[heading], after.get((heading, layer), 0)
        if (heading, rest) not in first:
            first[heading, rest] = place
            order.insert(at, rest)
            after[heading, layer] = at + 1
        else:
            after[heading, layer] = max(at, order.index(rest) + 1)
    return {first[heading, rest]: rank for heading, order in merged.items() for rank, rest in enumerate(order)}


def _unused(draft: Draft) -> Iterator[str]:
    """Yield the sections of tensors that the run did not use."""
    seen = {draft.parsed(one)[::2] for one in draft.found if one.parameter in draft.trace.seen}
    seen |= {draft.parsed(draft.original(one))[::2] for one in draft.found if draft.looked_up(one)}
    unused: dict[str, list[str]] = defaultdict(list)
    for heading, _, rest in map(draft.parsed, draft.found):
        if (heading, rest) not in seen and "@" not in rest and rest not in unused[heading]:
            unused[heading].append(rest)
    for heading, names in unused.items():
        if names:
            yield from ("", f"audit {heading}.{{}}" if heading else "audit")
            yield from (f"    {name}  unused" for name in names)
