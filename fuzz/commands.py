# SPDX-License-Identifier: Apache-2.0
"""Running a command as a user does, and judging what it says and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from onebasin.cli import app

from .cases import OK, REFUSED, Finding, Outcome

# A refusal names what is wrong and where. These are the words of an exception that nobody translated.
UNCLEAR = r"Traceback|object at 0x|Errno|report above|above report|<class 'onebasin|values to unpack"
LONGEST = 1500  # characters of a refusal, the paths in it included


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    stdout: str
    stderr: str
    trace: str = ""


def run(words: Sequence[object]) -> Said:
    """Run `onebasin WORDS` in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    trace = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        steps = traceback.extract_tb(result.exception.__traceback__)
        ours = [step for step in steps if "onebasin" in step.filename] or list(steps)
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else "?"
        text = " ".join(str(result.exception).split())[:200]
        trace = f"{type(result.exception).__name__} ({text}) at {where}"
    return Said(result.exit_code, result.stdout, result.stderr, trace)


def listing(folder: Path) -> dict[str, str]:
    """Return every path under a folder, with a hash of what it is: bytes, link, folder or special file."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            what = f"{stat.S_IFMT(mode):o}"
            if stat.S_ISLNK(mode):
                what += os.readlink(path)
            elif stat.S_ISREG(mode):
                what += hashlib.sha256(_ordered(path)).hexdigest()
            found[str(path.relative_to(folder))] = what
    return found


def _ordered(path: Path) -> bytes:
    """The bytes of a file; those of a whole safetensors file with its header sorted, since its library does not."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    size = int.from_bytes(data[:8], "little")
    try:
        return json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True).encode() + data[8 + size :]
    except (ValueError, RecursionError):
        return data


def refuse_changes(before: dict[str, str], room: Path, new: Collection[str] = ()) -> None:
    """Raise Finding where a file was lost or changed, or is left over. new: paths that may appear, and all in them."""
    after = listing(room)
    lost = sorted(before.keys() - after.keys())
    changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    more = after.keys() - before.keys()
    left = sorted(name for name in more if not any(Path(name).is_relative_to(one) for one in new))
    for what, names in (("lost", lost), ("changed", changed), ("left over", left)):
        if names:
            raise Finding(f"{what}: {', '.join(names[:4])}")


def judge(
    said: Said, before: dict[str, str], room: Path, *, new: Collection[str] = (), codes: Collection[int] = (0, 2)
) -> Outcome:
    """Return how a command ended that was tried with `room` as in `before`. new: what it may write, relative to the
    room, where it succeeds. codes: that are right. Raises Finding."""
    if said.trace:
        raise Finding(f"traceback: {said.trace}")
    if said.code not in codes:
        raise Finding(f"exit code {said.code}: {said.stderr.strip()[-300:]}")
    refuse_changes(before, room, () if said.code == 2 else new)
    return Outcome(REFUSED, sentence(said)) if said.code == 2 else Outcome(OK, "")


def sentence(said: Said) -> str:
    """Return the one sentence of a refusal. Raises Finding where it is none."""
    if said.trace:
        raise Finding(f"traceback: {said.trace}")
    lines = said.stderr.splitlines()
    if said.code != 2 or said.stdout or len(lines) != 1 or not lines[0].startswith("error: "):
        raise Finding(f"exit code {said.code}, not one line on stderr: {(said.stdout + said.stderr)[:300]!r}")
    text = lines[0].removeprefix("error: ")
    if re.search(UNCLEAR, text) or len(text) > LONGEST or len(text.split()) < 4:
        raise Finding(f"unclear refusal: {text[:400]}")
    return text


def shown(words: Sequence[object], room: Path) -> str:
    """The command as it could be typed in the room."""
    return shlex.join(["onebasin", *(str(word).replace(f"{room}/", "") for word in words)])
