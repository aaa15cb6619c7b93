# SPDX-License-Identifier: Apache-2.0
"""Planted recovery on inferred tables: is a model found again after every space of it was scrambled?

    python -m benchmarks.recovery [TYPE ...] [-o FILE]

Every type runs in a process of its own: its table is inferred, whether or not there is one by hand; a random element
acts on every space of a tiny twin in canonical form (permutations, signs, rotations, scales), and weights are matched
back to those of the twin. Where the search ends at a local optimum, it is tried again with `STARTS`. Without types, all
that docs/families.json calls exact take their turns; those that FILE has are left out. Prints what FILE says in a line.
FILE: {"transformers": version, "types": {TYPE: {"spaces", "before", "after", "starts", "seconds"}}}; before and after
are distances to the twin relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from .families import swept

FAMILIES = Path(__file__).parents[1] / "docs" / "families.json"
RECOVERED = 1e-5
STARTS = 20  # of the search, where one is not enough


def recovery(kind: str) -> dict[str, Any]:
    """Return how far a scrambled twin of a type is from the twin, before and after matching."""
    import torch
    from torch import Tensor

    from onebasin.matching import Weights, match_weights
    from onebasin.models import Canonical, Folder
    from onebasin.running import inference, twins
    from onebasin.running.trial import scrambling
    from onebasin.symmetry import acting_groups

    start = time.monotonic()
    model, _ = twins.build(kind)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        folder = Folder(place)
        folder.read_by(inference.of_config(folder.raw_config).table)
        twin = Canonical(folder, torch.float64)
        signature = twin.signature
        own = [role for role, entry in signature.tensors.items() if entry.alias is None]
        anchor = {role: twin.read(role, torch.float64) for role in own}
    planted = scrambling(signature, "full")
    source = {role: planted.apply(signature, role, tensor) for role, tensor in anchor.items()}
    groups = acting_groups(signature, "full", rescale="joint")

    def distance(other: dict[str, Tensor]) -> float:
        squares = sum(float((anchor[role] - other[role]).square().sum()) for role in own)
        return float((squares / sum(float(tensor.square().sum()) for tensor in anchor.values())) ** 0.5)

    for starts in (1, STARTS):
        back = match_weights(signature, lambda role: (anchor[role], source[role]), groups, Weights(starts=starts))
        after = distance({role: back.alignment.apply(signature, role, tensor) for role, tensor in source.items()})
        if after < RECOVERED:
            break
    return {"spaces": len(groups), "before": distance(source), "after": after, "starts": starts,
            "seconds": round(time.monotonic() - start, 1)}  # fmt: skip


def summary(types: dict[str, dict[str, Any]]) -> str:
    """Return what was recovered, as a sentence."""
    found = [each for each in types.values() if each.get("after", 1.0) < RECOVERED]
    spaces, before = [each["spaces"] for each in found], [each["before"] for each in found]
    return (
        f"{len(found)} of {len(types)} types, of {min(spaces)} to {max(spaces)} spaces, come back from distances of "
        f"{min(before):.2f} to {max(before):.2f} to within {max(each['after'] for each in found):.0e}; "
        f"{sum(each['starts'] > 1 for each in found)} of them took {STARTS} starts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (default: all that are exact)")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/recovery.json"))
    args = parser.parse_args()
    exact = [kind for kind, said in json.loads(FAMILIES.read_text("utf-8"))["types"].items() if said["exact"]]
    told = swept(args.types or exact, recovery, args.output, lambda found: found.get("after", found.get("reason")))
    print(summary(told))


if __name__ == "__main__":
    main()
