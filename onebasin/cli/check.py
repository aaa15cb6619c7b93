# SPDX-License-Identifier: Apache-2.0
"""onebasin check"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import common as c


def check(
    a: Annotated[str, typer.Argument(metavar="A", help="The model to rewrite: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to match it to.")],
    symmetry: Annotated[str, c.level(f"Level to check: {c.LEVELS}.")] = "paper",
    peek: Annotated[bool, typer.Option("--peek", help="Read one small matrix of each too, and compare them.")] = False,
    precision: c.Precision = "float32",
    family: c.Family = None,
    workers: c.Workers = None,
    json: c.Json = False,
) -> None:
    """Check whether A can be matched to B, before any weights are read. Exit code 0 if it can, 1 if not."""
    import onebasin

    found = onebasin.check(a, b, match=symmetry, peek=peek, precision=precision, family=family, workers=workers)
    if json:
        c.print_json(found)
    else:
        for line in _lines(found):
            print(line)
    raise typer.Exit(0 if found["can_match"] else 1)


def _lines(found: dict[str, Any]) -> list[str]:
    from onebasin.symmetry.tables.locate import some_of

    if found["can_match"]:
        lines = [f"can be matched at level {found['symmetry']}"]
        lines.append("moves: " + (", ".join(f"{key} ({name})" for key, name in found["moves"].items()) or "nothing"))
        lines.append("stays: " + ", ".join(found["fixed"]))
    else:
        lines = [f"cannot be matched: {found['reason']}"]
    for word, text in (("rows", "rows of '{}': {} and {}"), ("widened", "'{}' is widened from {} to {}")):
        lines += [text.format(name, *sizes) for name, sizes in found[word].items()]
    for word, text in (
        ("heads", "heads of different tasks, not matched"),
        ("only_a", "only in A"),
        ("only_b", "only in B, left out"),
        ("untied", "no longer tied"),
    ):
        if found[word]:
            lines.append(f"{text}: {some_of(found[word])}")
    lines.append(_vocabulary(found["vocabulary"]))
    if not found["can_match"]:
        return lines
    if found["common_ancestors"]:
        lines.append(f"both come from {some_of(found['common_ancestors'])}: they may be close already")
    elif not found["peek"]:
        lines.append("nothing indicates a common base model; --peek compares a matrix of each")
    if found["peek"]:
        lines.append(_peeked(**found["peek"]))
    memory = ", ".join(f"{level} {_range(*map(c.size, ends))}" for level, ends in found["memory"].items())
    lines.append(f"memory on top of the program's own, about: {memory}")
    expected = ", ".join(f"{level} {_range(*map(_time, ends))}" for level, ends in found["seconds"].items())
    lines.append(f"time on this machine, about: {expected}")
    lines.append(f"to verify outputs: {c.size(found['verify_memory'])}")
    return lines


def _range(least: str, most: str) -> str:
    return most if least == most else f"{least} to {most}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _vocabulary(found: dict[str, Any] | None) -> str:
    if found is None:
        return "vocabularies: not compared, since not both folders have one"
    if not found["first"]:
        return f"vocabularies: the same {found['size_a']} tokens"
    first = ", ".join(f"{number}: {a!r} and {b!r}" for number, a, b in found["first"])
    return (f"vocabularies differ: {found['size_a']} and {found['size_b']} tokens, {found['agreeing']} in common; "
            f"first at {first}")  # fmt: skip


def _peeked(tensor: str, cosine: float) -> str:
    if cosine > 0.9:
        meaning = "one base, so matching will change little"
    elif abs(cosine) < 0.2:
        meaning = "trained apart or rewritten, so matching is likely to matter"
    else:
        meaning = "related, so matching may matter"
    return f"cosine of '{tensor}': {cosine:.3f} ({meaning})"
