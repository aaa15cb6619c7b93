# SPDX-License-Identifier: Apache-2.0
"""The value that a merge file gives to a parameter of one tensor: scopes, filters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onebasin.settings import Weight, checked

from .schema import Conditional, Scalar, Setting


def number(name: str, scopes: Iterable[Mapping[str, Setting]], tensor: str, t: float) -> float | None:
    """Return the number that the settings give to the parameter `name` for a tensor, or None.

    scopes: from the most to the least specific (the source's, the slice's, the file's); one whose filters do not fit is
    skipped. tensor: its name. t: the position of its layer, from 0 (first) to 1 (last). A list of n values is a
    gradient, linear between its n points. Raises ValueError, quoting what is not a number.
    """
    for value in _found(name, scopes, tensor):
        points = [_float(name, point) for point in (value if isinstance(value, list) else [value])]
        place = t * (len(points) - 1)
        low = min(int(place), len(points) - 1)
        high = min(low + 1, len(points) - 1)
        part = place - low
        return (1 - part) * points[low] + part * points[high]
    return None


def truth(name: str, scopes: Iterable[Mapping[str, Setting]], tensor: str, t: float) -> bool | None:
    """Return the same for a parameter that is true or false; a gradient takes the last value whose point was
    reached."""
    for value in _found(name, scopes, tensor):
        points = value if isinstance(value, list) else [value]
        point = points[int(t * (len(points) - 1))]
        if isinstance(point, str) and point.lower() in ("true", "false"):
            return point.lower() == "true"
        if isinstance(point, str):
            raise ValueError(f"parameter '{name}': '{point}' is neither true nor false")
        return bool(point)
    return None


def _found(name: str, scopes: Iterable[Mapping[str, Setting]], tensor: str) -> Iterable[Scalar | list[Scalar]]:
    for scope in scopes:
        if name not in scope:
            continue
        setting = scope[name]
        choices: Sequence[object] = setting if isinstance(setting, list) else [setting]
        if not any(isinstance(choice, Conditional) for choice in choices):
            if setting != []:
                yield setting  # type: ignore[misc]
            continue
        for choice in choices:
            assert isinstance(choice, Conditional)
            if choice.filter in (None, "*") or str(choice.filter) in tensor:
                yield choice.value
                break


def _float(name: str, value: Scalar) -> float:
    found: float = checked(Weight, f"parameter '{name}'", value)
    return found
