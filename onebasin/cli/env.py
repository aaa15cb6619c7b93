# SPDX-License-Identifier: Apache-2.0
"""onebasin env"""

from __future__ import annotations

from . import common as c


def env(json: c.Json = False) -> None:
    """Print what a bug report needs: versions, machine, devices."""
    from onebasin.models.card import environment

    facts = environment()
    if json:
        c.print_json(facts)
        return
    for name, value in facts.items():
        print(f"{name}: {value}")
