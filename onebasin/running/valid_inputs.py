# SPDX-License-Identifier: Apache-2.0
"""Random inputs on which a model of any type runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from .made_inputs import LENGTH, Way, length_named, made_inputs, widths_named
from .probes import probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED = 48  # recipes for types that need other inputs than most
Inputs = dict[str, Tensor]
Recipe = Callable[[int, int], Inputs]  # (examples, seed) -> inputs
T = TypeVar("T")


def recipes(a: PreTrainedModel, b: PreTrainedModel, length: int, refused: Sequence[Exception] = ()) -> Iterator[Recipe]:
    """Yield recipes for inputs that two models of one type may accept, on a's device and in its dtype.

    First come the usual inputs, see `probe`; then, for types that need others (videos, patches, frames of sound), those
    of `made_inputs`, which always have the same number of examples; and these once more in the widths and with the
    number of tokens that refusals name. length: of the longest text, in tokens. refused: what is said of the recipes
    so far, as it grows.
    """
    yield lambda count, seed: probe(a, b, count, length, seed)
    with suppress(Exception):  # the inputs of some types cannot be derived
        yield from _made(a)
        widths, tokens = widths_named(refused), length_named(refused)
        if widths or tokens != LENGTH:
            yield from _made(a, widths, tokens)


def first_that_runs(
    a: PreTrainedModel, b: PreTrainedModel, count: int, length: int, seed: int, run: Callable[[Inputs], T]
) -> tuple[Recipe, Inputs, T]:
    """Return the first of `recipes` whose inputs `run` accepts, these inputs, and what it returned for them.

    Raises:
        Exception: That of `run` on the usual inputs, if it accepts none.
    """
    refused: list[Exception] = []
    for recipe in recipes(a, b, length, refused):
        try:
            given = recipe(count, seed)
            return recipe, given, run(given)
        except Exception as error:  # each class refuses inputs in its own way
            refused.append(error)
    raise refused[0]


def _made(model: PreTrainedModel, widths: Collection[int] = (), length: int = LENGTH) -> Iterator[Recipe]:
    ways = islice(made_inputs(model, widths=widths, length=length), TRIED)
    return (partial(_other, model, way) for way, _ in ways)


def _other(model: PreTrainedModel, way: Way, _: int, seed: int) -> Inputs:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in way.made(model, seed).items()
        if isinstance(value, Tensor)
    }
