# SPDX-License-Identifier: Apache-2.0
"""`python -m fuzz`: run a campaign, or one case of it again."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

import onebasin

from . import damage, families, files, folders, interruptions, isolation
from .cases import FINDING, OK, REFUSED, Case, Run

KINDS: dict[str, Run] = {
    **dict.fromkeys(damage.KINDS, damage.try_damage),
    "files": files.try_files,
    "family": families.try_family,
    **interruptions.KINDS,
}
# How many of every hundred cases are of a kind.
SHARES = {"header": 13, "shards": 4, "config": 10, "pickle": 6, "links": 5, "tokenizer": 3, "files": 5, "family": 24,
          "kill": 18, "full": 8, "writers": 4}  # fmt: skip


def drawn(cases: int, seed: int, only: list[str]) -> Iterator[Case]:
    """Yield so many cases, the kinds in turn, each kind by number from 0."""
    turns = sorted(((place + 0.5) / share, kind) for kind, share in SHARES.items() for place in range(share))
    kinds = [kind for _, kind in turns if not only or kind in only]
    numbers: Counter[str] = Counter()
    for number in range(cases):
        kind = kinds[number % len(kinds)]
        yield Case(kind, seed, numbers[kind])
        numbers[kind] += 1


def main(
    cases: Annotated[int, typer.Option(help="How many.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    workers: Annotated[int, typer.Option(help="Cases at a time.", min=1)] = 2,
    only: Annotated[list[str] | None, typer.Option(help=f"Of these kinds: {', '.join(KINDS)}.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="One case again, by its id.")] = None,
    skip: Annotated[int, typer.Option(help="Leave so many out at the beginning.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of the cases, and say where.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write every case to this file, a JSON object a line.")] = None,
) -> None:
    """Try bad and unusual input, kills and full disks. Exit code 1 where anything happens that must not."""
    for kind in only or []:
        if kind not in KINDS:
            raise typer.BadParameter(f"there is no kind '{kind}'; choose from {', '.join(KINDS)}")
    chosen = [Case.of(text) for text in case or []] or list(drawn(cases, seed, only or []))[skip:]
    began = time.monotonic()
    torch.set_num_threads(1)
    families.classes()
    for module in pkgutil.walk_packages(onebasin.__path__, "onebasin."):
        importlib.import_module(module.name)  # once, and all of one version whatever is edited meanwhile
    scratch = Path(tempfile.mkdtemp(prefix="onebasin-fuzz-"))
    counts: Counter[tuple[str, str]] = Counter()
    findings: list[tuple[Case, str, str]] = []
    written = log.open("w", encoding="utf-8") if log else None
    try:
        (scratch / "shared").mkdir()
        status, _ = isolation.forked(lambda: folders.make(scratch / "shared"))
        if status:
            raise SystemExit("the models to damage cannot be made")
        for done, (one, outcome, seconds) in enumerate(isolation.campaign(chosen, KINDS, scratch, workers, keep), 1):
            counts[one.kind, outcome.word] += 1
            if written:
                row = [str(one), outcome.word, outcome.said, outcome.tried, round(seconds, 2)]
                written.write(json.dumps(row) + "\n")
                written.flush()
            if outcome.word == FINDING:
                findings.append((one, outcome.said, outcome.tried))
                print(f"FINDING {one}: {outcome.said}\n    {outcome.tried}", flush=True)
            elif case:
                print(f"{outcome.word} {one}: {outcome.said}\n    {outcome.tried}", flush=True)
            if sys.stderr.isatty() or done % 100 == 0:
                told = f"{done} of {len(chosen)} cases, {len(findings)} findings, {time.monotonic() - began:.0f} s"
                print(f"\r{told} ", end="", file=sys.stderr)
    finally:
        if written:
            written.close()
        if keep:
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    print(file=sys.stderr)
    _report(counts, findings, time.monotonic() - began)
    sys.stdout.flush()
    os._exit(1 if findings else 0)


def _report(counts: Counter[tuple[str, str]], findings: list[tuple[Case, str, str]], seconds: float) -> None:
    heads = (OK, REFUSED, FINDING)
    print(f"{'kind':12}" + "".join(f"{head:>10}" for head in heads))
    for kind in KINDS:
        row = [counts[kind, head] for head in heads]
        if any(row):
            print(f"{kind:12}" + "".join(f"{number:10}" for number in row))
    total = [sum(counts[kind, head] for kind in KINDS) for head in heads]
    print(f"{'all':12}" + "".join(f"{number:10}" for number in total) + f"   in {seconds:.0f} s")
    for one, said, _ in findings:
        print(f"python -m fuzz --case {one}   # {said[:160]}")


if __name__ == "__main__":
    typer.run(main)
