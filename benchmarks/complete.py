# SPDX-License-Identifier: Apache-2.0
"""Whether what is inferred for model types is all there is.

    python -m benchmarks.complete [TYPE ...] [-o FILE] [--sample N]

An audit, on the smallest twin, of every type that FILE (docs/families.json) calls exact and inferred. FILE then says of
it `complete`, and `missing`: how many independent directions that leave all outputs unchanged its table does not
generate; or `unaudited`: why there is no audit, such as a twin that is too large. What FILE says already is kept, but
for the types that are named.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.families import SECONDS, tried

FILE = Path(__file__).parents[1] / "docs" / "families.json"


def audited(kind: str) -> dict[str, Any]:
    """Return what the audit of a type says."""
    from onebasin.studies.audit import audit_inferred

    found = audit_inferred(kind)
    if found.nullity < found.dimension:
        raise ValueError(f"{found.dimension} directions are generated, but only {found.nullity} count as flat")
    return {"complete": found.complete, "missing": found.nullity - found.dimension}


def counts(types: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many types were audited, are complete, and could not be audited."""
    asked = [one for one in types.values() if "complete" in one]
    whole = sum(one["complete"] for one in asked)
    refused = sum("unaudited" in one for one in types.values())
    return f"{whole} of {len(asked)} audited types are complete; {refused} could not be audited"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types, audited anew (default: all that FILE lacks)")
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    args = parser.parse_args()
    import torch
    import transformers

    from onebasin.studies.audit import POINTS  # before the fork: for all types at once

    torch.set_num_threads(1)  # threads do not survive a fork
    transformers.logging.set_verbosity_error()
    said = json.loads(args.output.read_text("utf-8"))
    types: dict[str, dict[str, Any]] = said["types"]
    rest = [kind for kind, one in types.items() if one["exact"] and one["source"] == "inferred"
            and not {"complete", "unaudited"} & one.keys()]  # fmt: skip
    if args.sample is not None:
        rest = random.Random(0).sample(rest, min(args.sample, len(rest)))
    for kind in args.types or rest:
        found = tried(kind, audited, POINTS * SECONDS)
        found = found if "complete" in found else {"unaudited": found["reason"]}
        kept = {key: value for key, value in types[kind].items() if key not in ("complete", "missing", "unaudited")}
        types[kind] = {**kept, **found}
        print(kind, found, flush=True)
        args.output.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n", "utf-8")
    print(counts(types))


if __name__ == "__main__":
    main()
