# SPDX-License-Identifier: Apache-2.0
"""What `onebasin match` and `onebasin merge` do without options on every model type, on two tiny models of it.

    python -m benchmarks.commands [TYPE ...] [-o FILE] [--sample N]

Every type is tried in a process of its own, in which no descent takes longer than `SECONDS`. What FILE says already is
kept, so it goes on where it was stopped. FILE: {"transformers": version, "types": {TYPE: {"works": ..., "reason": ...,
"lost": the notes of a merge that works on what it could not try or judge}}}; a type without a twin has `twin: false`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.complete import FILE
from benchmarks.families import swept

SECONDS = 2.0  # of a descent: a longer one finds no more faults
LOST = re.compile("no candidate|nothing could be tried|not judged: (?!on |agrees)")


def one(kind: str) -> dict[str, Any]:
    """Return whether both commands work on a type, or the first that fails and how."""
    from transformers.utils.logging import disable_progress_bar
    from typer.testing import CliRunner

    from onebasin.cli import app
    from onebasin.jobs.search import trials
    from onebasin.models import ModelError
    from onebasin.running import twins

    disable_progress_bar()
    for descent in ("distilled", "learned"):
        setattr(trials, descent, shortened(getattr(trials, descent)))
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in (0, 1):
            try:
                model, _ = twins.build(kind, seed=seed)
            except ModelError as error:
                return {"twin": False, "works": False, "reason": str(error)}
            model.float().save_pretrained(f"{place}/{seed}")
        for command in ("match", "merge"):
            asked = [command, f"{place}/0", f"{place}/1", "-o", f"{place}/{command}", "--json"]
            result = CliRunner().invoke(app, asked)
            if result.exit_code:
                said = result.output.strip()[-1000:]
                raised = "" if isinstance(result.exception, SystemExit) else repr(result.exception)
                return {"works": False, "reason": f"{command}: {raised} {said}"}
            facts = json.loads(Path(place, command, "onebasin.json").read_text("utf-8"))
            lost += filter(LOST.search, facts["result"]["notes"])
    return {"works": True, **({"lost": lost} if lost else {})}


def shortened(descent: Callable[..., Any]) -> Callable[..., Any]:
    """Return a candidate of the search that takes at most `SECONDS`. Its last argument says how many it may take."""
    return lambda *given: descent(*given[:-1], min(given[-1], SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (default: all that are exact)")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/commands.json"))
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    args = parser.parse_args()
    known = json.loads(FILE.read_text("utf-8"))["types"]
    kinds = args.types or [kind for kind, said in known.items() if said["exact"]]
    if args.sample is not None:
        kinds = random.Random().sample(kinds, min(args.sample, len(kinds)))
    types = swept(
        kinds, one, args.output, lambda found: found.get("lost", "works") if found.get("works") else found["reason"]
    )
    failed = [kind for kind, found in types.items() if not found.get("works")]
    print(f"both commands work on {len(types) - len(failed)} of {len(types)} types; not on: {', '.join(failed)}")


if __name__ == "__main__":
    main()
