# SPDX-License-Identifier: Apache-2.0
"""What is known of every model type that transformers registers: by table, inferred, or why not.

    python -m benchmarks.families [TYPE ...] [-o FILE]

Every type is tried in a process of its own, forked from one that has transformers loaded, and what FILE says already is
kept, so it goes on where it was stopped.
Prints how many types of each kind are exact. FILE: {"transformers": version, "types": {TYPE: {"source", "exact",
"free", "seconds" of computing, rounded up, "reason", ...}}}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterable
from math import ceil, inf
from pathlib import Path
from typing import Any

SECONDS, WALL = 120, 900  # for one type: of computing, so that a busy machine does not count; and by the clock
HEADER = "| types | registered | tried | exact | half free | fit | in 10 s |\n|---|---|---|---|---|---|---|"
GROUPS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
}


def one(kind: str) -> dict[str, Any]:
    """Return what is known of a type."""
    from onebasin.families import UnknownFamily, table_for
    from onebasin.models import ModelError
    from onebasin.running import inference

    start = time.process_time()
    try:
        source = "table" if table_for(kind) else ""
    except UnknownFamily:
        source = "inferred"
    try:
        found = inference.infer(kind)
    except ModelError as error:
        return {"source": source, "exact": False, "reason": str(error)}
    return {"source": source, "exact": True, "seconds": ceil(time.process_time() - start), **found.facts}


def tried(kind: str, work: Callable[[str], dict[str, Any]], seconds: int = SECONDS) -> dict[str, Any]:
    """Return what a process of its own says of a type by `work` within some seconds of computing, or how it ended."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        try:
            there.send(work(kind))
        except Exception as error:
            there.send({"source": "", "exact": False, "reason": f"{type(error).__name__}: {str(error)[:300]}"})

    process = fork.Process(target=child)
    process.start()
    there.close()
    try:
        if not here.poll(WALL):
            return {"source": "", "exact": False, "reason": f"took over {WALL} s by the clock"}
        found: dict[str, Any] = here.recv()
        return found
    except EOFError:
        process.join()
        slow = process.exitcode == -signal.SIGXCPU
        reason = f"took over {seconds} s of computing" if slow else f"its process ended with {process.exitcode}"
        return {"source": "", "exact": False, "reason": reason}
    finally:
        process.kill()
        process.join()


def counts(types: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for every kind of head, and for all types: how many there are, were tried, are exact, half free, fit, and
    are inferred within 10 s of computing."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    from onebasin.running import twins

    groups = {name: list(getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")) for name, head in GROUPS.items()}
    return {
        name: {
            "types": len(kinds),
            "tried": sum(kind in types for kind in kinds),
            "exact": sum(types.get(kind, {}).get("exact", False) for kind in kinds),
            "half free": sum(types.get(kind, {}).get("free", 0) >= 0.5 for kind in kinds),
            "fit": sum(types.get(kind, {}).get("fits") is True for kind in kinds),
            "in 10 s": sum(types.get(kind, {}).get("seconds", inf) <= 10 for kind in kinds),
        }
        for name, kinds in {**groups, "all with a class": list(filter(twins.classes, CONFIG_MAPPING))}.items()
    }


def table(types: dict[str, dict[str, Any]]) -> str:
    """Return these counts as a table in Markdown."""
    rows = [f"| {name} | {' | '.join(map(str, count.values()))} |" for name, count in counts(types).items()]
    return "\n".join([HEADER, *rows])


def swept(
    types: Iterable[str], work: Callable[[str], dict[str, Any]], output: Path, shown: Callable[[dict[str, Any]], object]
) -> dict[str, dict[str, Any]]:
    """Return what `work` says of all types in a file, after it was tried on those of these that the file lacks.

    shown: what is printed of a type.
    """
    import torch
    import transformers

    from onebasin.running import inference  # before the fork: for all types at once

    assert inference.infer
    torch.set_num_threads(1)  # threads do not survive a fork
    transformers.logging.set_verbosity_error()

    said: dict[str, Any] = json.loads(output.read_text("utf-8")) if output.exists() else {}
    if said.get("transformers") != transformers.__version__:
        said = {"transformers": transformers.__version__, "types": {}}
    for kind in types:
        if kind not in said["types"]:
            said["types"][kind] = found = tried(kind, work)
            print(kind, shown(found), flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n", "utf-8")
    kept: dict[str, dict[str, Any]] = said["types"]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/families.json"))
    args = parser.parse_args()
    from transformers import CONFIG_MAPPING

    kinds = args.types or sorted(CONFIG_MAPPING)
    print(table(swept(kinds, one, args.output, lambda found: "exact" if found["exact"] else found["reason"])))


if __name__ == "__main__":
    main()
