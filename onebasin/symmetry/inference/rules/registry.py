# SPDX-License-Identifier: Apache-2.0
"""The rules, by the names of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..trace import Call, Trace

Rule = Callable[[Trace, Call], Any]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return add
