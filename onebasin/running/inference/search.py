# SPDX-License-Identifier: Apache-2.0
"""Inferring the table of a model type from its own class, and proving it on twins of two sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from onebasin.engine import threads
from onebasin.models import ModelError
from onebasin.running import twins
from onebasin.running.classes import located_message
from onebasin.running.shrinking import Scale
from onebasin.symmetry import OtherSizes, Table, TableError, read_table
from onebasin.symmetry.inference.writing.draft import STYLES, Style

from .full_size import Stored, described, needs_all_layers, refitted, stored
from .proof import TOLERANCE, proved, to_blame, unmoved
from .text import Unalike, table_text, with_fixed, with_note
from .tracing import Traced, as_before, free_share, kinds, traced, untraced

LOSS = 0.9  # the least share of the free matrices that must stay free when layers that differ a little form one block
WIDE = 32  # size of a head, if the smallest twin does not show all of the structure
EVERY_LAYER = frozenset({"layers", "first", "period", "offset", "shared"})  # numbers to keep, for layers of all kinds
COUNTS = frozenset({"heads", "key heads", "groups", "head groups"})  # to keep, where one divides another in twins only
LARGER = ((16, 3), (16, 4), (14, 3), (14, 2))  # size and number of heads of the other twin, the first that runs
WIDER = ((16, 6), *LARGER)  # beside a wide one: as many heads in each of its shards, say
FAILURES = (ValueError, RuntimeError, LookupError, AssertionError)  # of a run, a table or its proof
DEEPEST = 8  # most layers of a twin that is deepened until it has every kind of layer


Attempt = tuple[str, Traced, float, Style]  # a table, the twin it describes, its free share, how it was written


@dataclass(frozen=True)
class Inferred:
    """A table with its proof. departure: the largest relative change of the twins' outputs by random elements, in
    float64. free: the share of matrices on which some group acts. unknown: operations without a rule. lowered: spaces
    that the rules allow to move, but that are fixed because an element changed the outputs. fits: whether the table
    describes the model itself, of which twins are smaller; None if its class refuses the configuration."""

    text: str
    departure: float
    free: float
    unknown: dict[str, int]
    style: Style
    lowered: list[str]
    fits: bool | None = None

    @cached_property
    def table(self) -> Table:
        return read_table(self.text, "inferred")

    @property
    def facts(self) -> dict[str, Any]:
        """Everything about it but the table, for the cache and for `--json`."""
        return {"departure": self.departure, "free": self.free, "unknown": self.unknown, "lowered": self.lowered,
                "style": STYLES.index(self.style), "fits": self.fits}  # fmt: skip

    @classmethod
    def of(cls, text: str, facts: Mapping[str, Any]) -> Inferred:
        """Create one from a table and its facts."""
        return cls(text, **{**facts, "style": STYLES[facts["style"]]})


@threads(1)  # twins are tiny: more threads only wait for each other
def infer(config: PretrainedConfig | str, cls: str | None = None) -> Inferred:
    """Infer the table of a model type, and prove it on tiny twins of two sizes.

    If the canonical form changes the outputs of a twin, the tensors responsible are exempted from it, or a table with
    fewer notes on constants is tried; if random elements do, the spaces responsible are fixed. If the model itself has
    other tensors, or layers of other sizes, the table is inferred again from a twin with all of its layers; if its axes
    do not split as those of the twin do, from one with as many heads and groups.

    Args:
        config: A configuration, or a model type, for its default configuration.
        cls: The name of the class (default: the one in the configuration, else the one with most of the model).

    Raises:
        ModelError: No twin could be built, or no table was found that leaves its outputs unchanged.
    """
    built = twins.build(config, cls)
    cls = type(built[0]).__name__
    itself = stored(config, cls)
    found = _infer(config, cls, itself, built=built)
    if itself is None:
        return found
    whole = described(found.text, itself)
    if needs_all_layers(found.text, whole):
        with suppress(ModelError):
            other = _infer(config, cls, itself, Scale(kept=EVERY_LAYER))
            if not needs_all_layers(other.text, again := described(other.text, itself)):
                found, whole = other, again
    if isinstance(whole, OtherSizes) and len(whole.spaces) > 1:  # an axis of several that does not split into them
        with suppress(ModelError):
            other = _infer(config, cls, itself, Scale(kept=COUNTS))
            if not isinstance(again := described(other.text, itself), TableError):
                found, whole = other, again
    return replace(found, fits=not isinstance(whole, TableError))


def _infer(
    config: PretrainedConfig | str,
    cls: str,
    itself: Stored | None,
    scale: Scale | None = None,
    others: Sequence[tuple[int, int]] = LARGER,
    widen: bool = True,
    built: tuple[PreTrainedModel, Mapping[str, Any]] | None = None,
) -> Inferred:
    """Infer a table from a twin, or from another one if this does not show all of the structure.

    Args:
        config: A configuration, or a model type.
        cls: The name of the class.
        itself: What a folder has of the model, if its class accepts the configuration.
        scale: Of the twin (default: the smallest at which it runs).
        others: Sizes and numbers of heads to try for the other twin.
        widen: Whether to infer it from a wide twin if it would not be exact.
        built: The twin and its inputs, if it is there already.
    """
    again, here = partial(_infer, config, cls, itself), scale or Scale()
    every, wide = Scale(kept=EVERY_LAYER), replace(here, head=WIDE, heads=8)  # wide: shards of several heads and pairs
    narrow = not here.kept and here.head < WIDE
    larger = _larger(config, cls, here.kept, here.layers + 1, others)
    try:
        found = traced(*(built or twins.build(config, cls, 0, scale)))
    except FAILURES as error:  # axes that contain themselves, say
        raise ModelError(f"no exact table could be inferred for {cls}: {located_message(error)}") from None
    few = larger is not None and bool(kinds(larger.axes) - kinds(found.axes))  # the other has more kinds of layers
    if few and not here.kept and here.layers < DEEPEST:
        return again(Scale(layers=here.layers + 2))

    reason, attempts, free = "", list[Attempt](), free_share(found)
    for style in STYLES:
        try:
            with as_before(found):
                text = table_text(found, style, larger, bool(here.kept), strict=narrow and widen)
                left = free_share(found)
        except Unalike:
            with suppress(ModelError):
                return again(wide, WIDER)
            return again(scale, others, widen=False)
        except FAILURES as error:
            reason = reason or located_message(error)
            continue
        if not here.kept and (few or left < LOSS * free):  # list layers by name, which needs all of them
            with nullcontext() if few else suppress(ModelError):  # unless that twin is too large
                return again(every)
        level, departure = "", inf
        try:
            text, departure, level = _with_constants(text, found, larger)
        except FAILURES as error:
            reason = reason or located_message(error)
            if narrow and _single(found, larger):
                return again(replace(here, head=WIDE), others)
            if not here.kept and isinstance(error, TableError):  # layers by name, and the other twin has more of them
                return again(every)
            if isinstance(error, TableError) and others != LARGER[-1:]:  # heads that are cut in half, say
                return again(scale, LARGER[-1:])
        if departure < TOLERANCE:
            text = refitted(text, itself, found, larger)
            return Inferred(text, departure, left, found.trace.unknown, style, [])
        reason = reason or f"random elements change the outputs by {departure:.2g}"
        if narrow and widen and level and level != "invertible":
            with suppress(ModelError):
                return again(wide, WIDER)
            widen = False
        attempts.append((text, found, left, style))
        if level != "invertible":  # to state less of constants would not help
            if (exact := _blamed(attempts, larger, itself)) is not None:
                return exact
            attempts = []
    if (exact := _blamed(attempts, larger, itself)) is not None:
        return exact
    raise ModelError(f"no exact table could be inferred for {cls}: {reason}")


def _blamed(attempts: Sequence[Attempt], larger: Traced | None, itself: Stored | None) -> Inferred | None:
    """Return the first of some tables that is exact once the spaces to blame stay, if there is one."""
    for text, found, left, style in attempts:
        lowered: dict[str, float] = {}
        with suppress(*FAILURES):
            while not (blame := to_blame(text, found, larger)).keys() <= lowered.keys():
                lowered |= blame
                text, departure, _ = _with_constants(with_fixed(text, blame), found, larger)
                if departure < TOLERANCE:
                    text = refitted(text, itself, found, larger)
                    return Inferred(text, departure, left, found.trace.unknown, style, sorted(lowered))
    return None


def _with_constants(text: str, *found: Traced | None) -> tuple[str, float, str]:
    """Return a table and the result of `proved`. Tensors that the canonical form must not change get a note."""
    departure, level = proved(text, *found)
    if level == "invertible" and (still := unmoved(text, *found)):
        text = with_note(text, still, "stays")
        departure, level = proved(text, *found)
    return text, departure, level


def _single(found: Traced, larger: Traced | None) -> bool:
    """Whether some dimension is 1 in this twin and larger in the other."""
    mine, other = (twin.model.state_dict() if twin else {} for twin in (found, larger))
    return any(n == 1 < more for name in mine.keys() & other.keys()
               for n, more in zip(mine[name].shape, other[name].shape, strict=False))  # fmt: skip


def _larger(
    config: PretrainedConfig | str,
    cls: str,
    kept: frozenset[str] = frozenset(),
    layers: int = 3,
    scales: Sequence[tuple[int, int]] = LARGER,
) -> Traced | None:
    """Return another twin, with other sizes and numbers of heads and one more layer, if one can be built: sizes that
    agree by chance in one twin do not in both.

    Args:
        config: A configuration, or a model type.
        cls: The name of the class.
        kept: Kinds of numbers that are not changed.
        layers: The number of layers, unless a list determines it.
        scales: The sizes and numbers of heads to try, since some classes want powers of two.
    """
    for head, heads in scales:
        try:
            return untraced(*twins.build(config, cls, 1, Scale(head, layers, heads, kept)))
        except ModelError:
            continue
    return None
