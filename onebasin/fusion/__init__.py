# SPDX-License-Identifier: Apache-2.0
"""Merging models that are already aligned: one file per method. Aligned models in, tensors of one model out.

Nothing here aligns anything, and nothing here knows how an alignment was found. A method is a dataclass, see
`onebasin.fusion.method`; packages add methods by the entry point group `onebasin.methods`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .method import Method

GROUP = "onebasin.methods"
AVERAGES = {
    "average": "average:Average",
    "norm-preserving": "norm_preserving:NormPreserving",
    "spectrum-preserving": "spectrum_preserving:SpectrumPreserving",
    "circuit": "circuits:Circuit",
}  # which read weights alone
OWN = {
    **AVERAGES,
    "ot": "couplings:OptimalTransport",
    "fisher": "fisher:Fisher",
    "regmean": "regmean:RegMean",
    "progressive": "progressive:ProgressiveMerge",
}


@cache
def installed() -> dict[str, list[EntryPoint]]:
    """Return the methods of other packages: name -> the entry points that offer it."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


METHODS = (*OWN, *(name for name in installed() if name not in OWN))


@cache
def method_of(name: str) -> type[Method]:
    """Return the method of this name.

    Raises:
        ValueError: for an unknown name, one that several packages offer, and a package that cannot be loaded.
    """
    offers = installed().get(name, [])
    if len(offers) + (name in OWN) > 1:
        owners = [*(["onebasin"] if name in OWN else []), *(point.dist.name if point.dist else "?" for point in offers)]
        raise ValueError(f"several packages offer the method '{name}': {', '.join(owners)}; remove all but one")
    if name in OWN:
        module, _, kind = OWN[name].partition(":")
        own: type[Method] = getattr(import_module(f".{module}", __name__), kind)
        return own
    if not offers:
        from onebasin.settings import choose_from  # which takes pydantic

        raise ValueError(f"unknown method '{name}'; {choose_from(name, METHODS)}")
    from .method import Method  # which takes seconds to import

    try:
        found = offers[0].load()
    except Exception as error:  # an import may fail in any way
        raise ValueError(f"the method '{name}' cannot be loaded from {offers[0].value}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"the method '{name}' ({offers[0].value}) is no subclass of onebasin.fusion.method.Method")
    return found


def loadable() -> dict[str, type[Method]]:
    """Return all methods that can be loaded, by name; `method_of` says what is wrong with the others."""
    found: dict[str, type[Method]] = {}
    for name in METHODS:
        with suppress(ValueError):
            found[name] = method_of(name)
    return found


def name_of(kind: type[Method]) -> str:
    """Return the name of a method, or that of its class if it has none."""
    own = f"{kind.__module__.removeprefix(__name__ + '.')}:{kind.__qualname__}"
    names = [name for name, where in OWN.items() if where == own]
    names += [name for name, points in installed().items() for point in points
              if point.value == f"{kind.__module__}:{kind.__qualname__}"]  # fmt: skip
    return names[0] if names else kind.__name__
