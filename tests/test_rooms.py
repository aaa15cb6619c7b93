# SPDX-License-Identifier: Apache-2.0
"""The architecture: which room may import which, as CONTRIBUTING.md draws it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onebasin

PACKAGE = Path(onebasin.__file__).parent
# From the ground up. Rooms of one floor do not import each other.
FLOORS = [
    {"settings"},
    {"symmetry"},
    {"config_files"},
    {"families"},
    {"engine"},
    {"models"},
    {"running"},
    {"data"},
    {"matching", "fusion", "landscape"},
    {"jobs"},
    {"studies"},
    {"cli"},
    {"__main__"},
]
INNER = [
    {"groups"},
    {"tables"},
    {"gauge"},
    {"alignment"},
    {"levels", "coupling"},
    {"exactness"},
    {"audit", "inference"},
]  # of symmetry


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, module, what it imports) within the package; what only type checking needs does not count."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = (PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text("utf-8"))
        guards = (node for node in ast.walk(tree) if isinstance(node, ast.If))
        typing = {id(inner) for guard in guards if "TYPE_CHECKING" in ast.dump(guard.test) for inner in ast.walk(guard)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in typing:
                continue
            base = parts[: len(parts) - node.level] if node.level else ()
            target = ".".join([*base, *([node.module] if node.module else [])])
            if target.startswith(PACKAGE.name + "."):
                yield str(path.relative_to(PACKAGE)), module, target


def upward(floors: list[set[str]], depth: int, within: str) -> list[str]:
    """Imports that do not lead down, among modules whose names begin with `within`."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    wrong = []
    for file, module, target in imports():
        rooms = [name.split(".")[depth] if name.count(".") >= depth else "" for name in (module, target)]
        if module.startswith(within) and target.startswith(within) and rooms[0] != rooms[1] and all(rooms):
            here, there = (floor[room] for room in rooms)
            if here <= there:
                wrong.append(f"{file} imports {target}")
    return wrong


def test_imports_lead_down() -> None:
    assert upward(FLOORS, 1, "onebasin.") == []


def test_imports_inside_symmetry_lead_down() -> None:
    assert upward(INNER, 2, "onebasin.symmetry.") == []


def test_only_the_audit_imports_the_audit() -> None:
    users = {file for file, _, target in imports() if target.startswith("onebasin.symmetry.audit")}
    assert {file for file in users if not file.startswith("symmetry/audit")} == {"studies/audit.py"}
