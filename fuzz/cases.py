# SPDX-License-Identifier: Apache-2.0
"""What a case is, and how it can end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OK, REFUSED, FINDING = "ok", "refused", "FINDING"


class Finding(Exception):
    """Something that must not happen: a traceback, a wrong function, a lost or changed file, code that ran..."""


@dataclass(frozen=True)
class Case:
    """One case of a campaign. kind: what is tried. seed, number: what is drawn follows from these."""

    kind: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.seed}-{self.number}"

    @classmethod
    def of(cls, text: str) -> Case:
        """Return the case of an id such as `header-0-17`."""
        kind, seed, number = text.rsplit("-", 2)
        return cls(kind, int(seed), int(number))

    def draw(self, *what: object) -> random.Random:
        """Return a generator of its own for this case. what: further words that it depends on."""
        return random.Random("-".join(map(str, (self, *what))))


@dataclass(frozen=True)
class Outcome:
    """How a case ended. word: OK, REFUSED or FINDING. said: in one line; tried: what was done to which command."""

    word: str
    said: str
    tried: str = ""


@dataclass(frozen=True)
class Place:
    """Where a case works. room: an empty folder of its own. shared: a folder of the campaign, for what many need."""

    room: Path
    shared: Path


Run = Callable[[Case, Place], Outcome]
