# SPDX-License-Identifier: Apache-2.0
"""Audit tiny models and record what was found: `python docs/audits.py [TYPE ...]`.

docs/audits.json has an entry for every family: the model type and the settings of its tiny model, and what the audit
counted. docs/families.md is made from it. All entries take some minutes; name types to run only these again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from onebasin.checkpoint import Checkpoint
from onebasin.studies.audit import audit, tiny_model
from onebasin.symmetry import Signature, acting_groups

RECORD = Path(__file__).with_name("audits.json")


def record(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The audit of a model type, and the dimension of the largest group of each of its spaces, over all layers."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(kind, **settings).save_pretrained(folder)
        spaces = dimensions(Checkpoint(folder).signature)
    found = audit(kind, **settings)
    return {"settings": settings, "spaces": spaces, "parameters": found.parameters, "nullity": found.nullity,
            "dimension": found.dimension, "complete": found.complete}  # fmt: skip


def dimensions(signature: Signature) -> dict[str, tuple[str, int, int]]:
    """Name of a space that moves -> its kind, its size, the dimension of its largest group over heads and layers."""
    groups = acting_groups(signature, "invertible", rescale="joint")
    found: dict[str, tuple[str, int, int]] = {}
    for root, group in groups.items():
        space = signature.spaces[root]
        count = group.dimension(space.size)
        for outer in space.batch:
            count *= signature.sizes[outer]
        kind, size, before = found.get(space.name, (signature.kinds[root], space.size, 0))
        found[space.name] = (kind, size, before + count)
    return found


if __name__ == "__main__":
    entries = json.loads(RECORD.read_text("utf-8"))
    for kind in sys.argv[1:] or entries:
        entries[kind] |= record(kind, entries[kind]["settings"])
        print(kind, entries[kind]["nullity"], entries[kind]["dimension"], entries[kind]["complete"], flush=True)
        RECORD.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", "utf-8")
