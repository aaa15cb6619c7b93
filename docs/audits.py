# SPDX-License-Identifier: Apache-2.0
"""Audit tiny models and record what was found: `python docs/audits.py [TYPE ...]`.

docs/audits.json has an entry for every family, and for some configurations with symmetries of their own, `TYPE: what`:
the settings of the tiny model, and what the audit counted, or the reason why it does not. docs/families.md is made from
it. All entries take some minutes; name some to run only these again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from onebasin.models import Folder
from onebasin.studies.audit import audit
from onebasin.studies.tiny_models import tiny_model
from onebasin.symmetry import Signature, acting_groups

RECORD = Path(__file__).with_name("audits.json")


def record(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The audit of a model type, and the dimension of the largest group of each of its spaces, over all layers."""
    kind = name.partition(":")[0]
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(kind, **settings).save_pretrained(folder)
        spaces = dimensions(Folder(folder).signature)
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
    for name in sys.argv[1:] or [name for name, entry in entries.items() if "reason" not in entry]:
        entries[name] |= record(name, entries[name]["settings"])
        print(name, entries[name]["nullity"], entries[name]["dimension"], entries[name]["complete"], flush=True)
        RECORD.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", "utf-8")
