# SPDX-License-Identifier: Apache-2.0
"""The order of tensors in a table: that of the run, with norms right after what they read."""

from __future__ import annotations

from ..trace import Normed
from .draft import Draft


def by_run(draft: Draft) -> None:
    """Sort the tensors by their first use; the original of a tied table comes right before it."""
    trace = draft.trace
    order = {name: float(place) for place, name in enumerate(trace.seen)}
    for one in reversed(draft.found):
        if one.tied and draft.looked_up(one) and (home := draft.original(one)).parameter not in trace.seen:
            order[home.parameter] = min(order[one.parameter] - 0.5, order.get(home.parameter, len(order)))
    draft.found.sort(key=lambda one: order.get(one.parameter, len(order)))


def follow(draft: Draft, norm: Normed) -> None:
    """Put a norm in the order of tables: right after the writers of its input if it writes back, and right after an
    earlier norm of the same vectors."""
    mine = [one for one in draft.found if one.parameter in (norm.weight, norm.bias) and len(one.axes) == 1]
    last = [leaf.top for leaf in norm.source.leaves if leaf.size > 1][-1:]
    first = next((each for each in draft.trace.norms if each.weight == draft.trace.together.get(norm.weight)), None)
    if not mine or not (last if first is None else draft.free[norm.weight]):
        return
    before = draft.found[: draft.found.index(mine[0])]
    if first is not None:
        places = [place for place, one in enumerate(before) if one.parameter in (first.weight, first.bias)]
    elif draft.free[norm.weight]:
        return
    else:
        places = [place for place, one in enumerate(before) for axis in one.axes if axis is not None
                  for leaf in axis.leaves if leaf.top == last[0]]  # fmt: skip
    if places:
        rest = [one for one in draft.found if one not in mine]
        draft.found = [*rest[: places[-1] + 1], *mine, *rest[places[-1] + 1 :]]
