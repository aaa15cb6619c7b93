# SPDX-License-Identifier: Apache-2.0
"""Which model types have a tiny twin that runs: all that the installed transformers knows, one after another.

`python -m onebasin.running.twin_sweep FILE [TYPE...]` writes a line of JSON for each type and prints the counts; types
that the file has already are left out.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto

SECONDS = 60.0  # for one type; a process that takes longer is ended
GROUPS = {
    "causal language models": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked language models": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image classifiers": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "all": "MODEL_MAPPING_NAMES",
}


def sweep(path: str | Path, types: Iterable[str] = (), seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Build and run the twin of each type, and write what came of it.

    Args:
        path: A file of JSON lines; what it says already is not found again.
        types: Model types (default: all).
        seconds: The most that one type may take; it runs in another process, so that no crash ends the sweep.

    Returns:
        The lines: `type`, `class`, `parameters`, `inputs`, `unused` parameters, `seconds`, and `reason` where it does
        not run.
    """
    place = Path(path)
    known = [json.loads(line) for line in place.read_text("utf-8").splitlines()] if place.exists() else []
    found = {line["type"]: line for line in known}
    wanted = list(types) or [*modeling_auto.MODEL_MAPPING_NAMES]
    context = multiprocessing.get_context("spawn")
    worker: Any = None
    for kind in wanted:
        if kind in found:
            continue
        if worker is None:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
        start = time.monotonic()
        ours.send(kind)
        try:
            line = ours.recv() if ours.poll(seconds) else {"reason": f"took more than {seconds:g} seconds"}
        except EOFError:
            line = {"reason": "its process ended"}
        if "seconds" not in line:
            worker.kill()
            worker = None
        found[kind] = {"type": kind, **line, "seconds": round(time.monotonic() - start, 2)}
        with place.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[kind]) + "\n")
    if worker is not None:
        worker.kill()
    return [found[kind] for kind in wanted]


def counts(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return group -> how many of its types run, and how many it has.

    Args:
        lines: What `sweep` returns.
    """
    ran = {line["type"] for line in lines if "reason" not in line}
    groups = {name: getattr(modeling_auto, mapping) for name, mapping in GROUPS.items()}
    return {name: (len(ran & mapping.keys()), len(mapping)) for name, mapping in groups.items()}


def _work(calls: Connection) -> None:
    """Answer model types with what came of their twins."""
    import torch

    from .twins import build, unused

    torch.set_num_threads(1)
    while True:
        kind = calls.recv()
        line: dict[str, Any] = {}
        try:
            model, inputs = build(kind)
            line = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters()),
                    "inputs": [*inputs]}  # fmt: skip
            line["unused"] = unused(model, inputs)
        except Exception as error:  # each class has its own
            line["reason" if "class" not in line else "no gradient"] = " ".join(str(error).split())[:300]
        calls.send({**line, "seconds": 0})


def main() -> None:
    """Sweep, and print the counts and the reasons."""
    lines = sweep(sys.argv[1], sys.argv[2:])
    for line in lines:
        if "reason" in line:
            print(f"{line['type']}: {line['reason']}")
    for name, (ran, among) in counts(lines).items():
        print(f"{name}: {ran} of {among}")


if __name__ == "__main__":
    main()
