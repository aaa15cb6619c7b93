# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, that find the disk full, or that share their output with another, at every moment.

A scenario is a command in a small world of folders. It is run once undisturbed, which shows what it writes and at
which moments it changes the disk; each case disturbs it at one of these.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import OK, REFUSED, Case, Finding, Outcome, Place
from .commands import Said, listing, refuse_changes, run, sentence, shown
from .folders import copied
from .isolation import forked
from .moments import FOLDER, OPEN, RENAME, SYNC, WRITE, Watch, die, full

FILE = "models:\n- model: world/a\n- model: world/b\nmerge_method: linear\nparameters: {weight: 0.5}\ndtype: float32\n"


@dataclass(frozen=True)
class Scenario:
    """words: of the command; A, B and L stand for models and an adapter. resumes: whether `--resume` goes on with it.
    old: whether an older model stands where it writes."""

    words: str
    resumes: bool = True
    old: bool = False


SCENARIOS = {
    "match": Scenario("match A B -o out"),
    "match-maps": Scenario("match A B -o out --alignment maps.safetensors"),
    "match-full": Scenario("match A B -o out --symmetry full"),
    "match-elsewhere": Scenario("match A B -o new/out --symmetry orthogonal --anchor-output other/anchor"),
    "match-adapter": Scenario("match A B -o out --adapter L"),
    "match-all": Scenario("match A B -o out --symmetry full --alignment maps.safetensors"),
    "match-over": Scenario("match A B -o out --overwrite", old=True),
    "match-full-over": Scenario("match A B -o out --symmetry full --overwrite", old=True),
    "merge": Scenario("merge A B -o out --match paper"),
    "merge-search": Scenario("merge A B -o out --samples 16"),
    "merge-full": Scenario("merge A B -o out --match full"),
    "merge-none": Scenario("merge A B -o out --match none"),
    "merge-shards": Scenario("merge A B -o out --match paper --out-shard-size 6KB"),
    "merge-over": Scenario("merge A B -o out --match paper --overwrite", old=True),
    "merge-file": Scenario("merge --config file.yml -o out", resumes=False),
    "canonical": Scenario("canonical A -o out", resumes=False),
    "canonical-over": Scenario("canonical A -o out --overwrite", resumes=False, old=True),
}
FIRST = (RENAME, SYNC)  # the moments that every campaign reaches first


def world(room: Path, shared: Path, name: str) -> list[str]:
    """Make the folders of a scenario and return its command, whose paths begin in the room: we go there."""
    scenario, where = SCENARIOS[name], room / "world"
    room.mkdir(exist_ok=True)
    os.chdir(room)
    for letter in "ab":
        copied(shared, f"bert-{letter}", where / letter)
    copied(shared, "adapter", where / "adapter")
    (where / "file.yml").write_text(FILE)
    if scenario.old:
        for out in ("out", "out-anchor") if "full" in name else ("out",):
            copied(shared, "gpt2-a", where / out)
    meant = {"A": "a", "B": "b", "L": "adapter"}
    places = {"-o", "--alignment", "--anchor-output", "--config"}
    words = scenario.words.split()
    found = []
    for before, word in zip(["", *words], words, strict=False):
        is_path = word in meant or before in places
        found.append(f"world/{meant.get(word, word)}" if is_path else word)
    return found if "--config" in found or found[0] == "canonical" else [*found, "--workers", "1"]


@dataclass(frozen=True)
class Whole:
    """What an undisturbed run leaves: path -> hash, and the moments that it had."""

    files: dict[str, str]
    moments: list[str]


def watched(words: list[str], room: Path, at: int = -1, act: Any = None) -> tuple[int, tuple[Said, list[str]] | None]:
    """Run a command in a fork, disturbed at one moment. Returns its wait status and, where it lived, what it said."""

    def work() -> tuple[Said, list[str]]:
        watch = Watch(room, at, act)
        said = run(words)
        return said, watch.seen

    return forked(work)


def undisturbed(name: str, place: Place) -> Whole:
    """Return what a scenario does by itself; the first case to ask finds out."""
    kept = place.shared / f"whole-{name}"
    with (place.shared / f"{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            room = place.shared / f"{kept.name}.room"
            words = world(room, place.shared, name)
            _, answer = watched(words, room)
            if answer is None or answer[0].code:
                raise AssertionError(f"{name} does not run: {answer and answer[0].stderr}")
            kept.write_bytes(pickle.dumps(Whole(lasting(listing(room)), answer[1])))
            shutil.rmtree(room)
        found: Whole = pickle.loads(kept.read_bytes())
        return found


def lasting(files: dict[str, str]) -> dict[str, str]:
    """The listing without what differs from run to run: times, memory and paths in the records."""
    names = ("README.md", "onebasin.json", "mergekit_config.yml")
    return {path: "text" if path.endswith(names) else what for path, what in files.items()}


def outputs(name: str, whole: dict[str, str]) -> list[str]:
    """The paths that a scenario writes, relative to the room, the outermost ones."""
    new = {Path(*Path(path).parts[:2]) for path in whole}
    given = {Path("world", one) for one in ("a", "b", "adapter", "file.yml")}
    return sorted(str(path) for path in new - given - {Path("world")})


def chosen(case: Case, place: Place, what: Collection[str] = ()) -> tuple[str, Whole, int]:
    """Return the scenario of a case, what it does by itself, and the moment to disturb it at.

    A kind's cases go through all moments of all scenarios (what: of these sorts alone) in an order that the seed draws,
    renames and syncs before the others.
    """
    wholes = {name: undisturbed(name, place) for name in sorted(SCENARIOS)}
    pairs = [
        (name, at)
        for name, whole in wholes.items()
        for at, sort in enumerate(whole.moments)
        if not what or sort in what
    ]
    random.Random(f"{case.kind}-{case.seed}").shuffle(pairs)
    pairs.sort(key=lambda pair: wholes[pair[0]].moments[pair[1]] not in FIRST)
    name, at = pairs[case.number % len(pairs)]
    return name, wholes[name], at


def whole_or_absent(room: Path, name: str, before: dict[str, str], whole: Whole) -> bool:
    """Whether all outputs are there; Finding where one is neither as it was nor whole."""
    after = lasting(listing(room))
    complete = True
    for out in outputs(name, whole.files):

        def under(files: dict[str, str], out: str = out) -> dict[str, str]:
            return {path: what for path, what in files.items() if Path(path).is_relative_to(out)}

        found = under(after)
        if found == under(whole.files):
            continue
        complete = False
        if found and found != under(lasting(before)) and Path(out).name.startswith(("out", "maps")):
            raise Finding(f"half-written: {out} ({len(found)} paths instead of {len(under(whole.files))})")
    return complete


def same(room: Path, whole: Whole) -> None:
    """Raise Finding where what is there is not what an undisturbed run leaves."""
    after = lasting(listing(room))
    after = {path: what for path, what in after.items() if Path(path).parts[0] == "world"}
    expected = {path: what for path, what in whole.files.items() if Path(path).parts[0] == "world"}
    other = {path for path in after.keys() & expected.keys() if after[path] != expected[path]}
    for what, names in (
        ("lost", expected.keys() - after.keys()),
        ("left over", after.keys() - expected.keys()),
        ("differs from an undisturbed run", other),
    ):
        if names:
            raise Finding(f"{what}: {', '.join(sorted(names)[:4])}")


def inputs_kept(before: dict[str, str], room: Path) -> None:
    """Raise Finding where an input was lost or changed."""
    after = listing(room)
    inputs = {("world", one) for one in ("a", "b", "adapter", "file.yml")}
    for path, what in before.items():
        if Path(path).parts[:2] in inputs and after.get(path) != what:
            raise Finding(f"an input was lost or changed: {path}")


def try_kill(case: Case, place: Place) -> Outcome:
    """Kill a run at a moment, run it again with --resume, and compare with an undisturbed run."""
    name, whole, at = chosen(case, place)
    words = world(place.room, place.shared, name)
    tried = f"killed at moment {at} of {len(whole.moments)} ({whole.moments[at]}): {shown(words, place.room)}"
    before = listing(place.room)
    try:
        status, answer = watched(words, place.room, at, die)
        if answer is not None:
            return Outcome(OK, "it was done before", tried)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise Finding(f"not killed but ended: {status}")
        for each in (place.room / "tmp").iterdir():  # as the system empties its own
            removed(each)
        inputs_kept(before, place.room)
        done = whole_or_absent(place.room, name, before, whole)
        again = [*words, "--resume"] if SCENARIOS[name].resumes else words
        _, answer = watched(again, place.room)
        said = answer[0] if answer else Said(-1, "", "it died")
        if said.code == 2 and "exist" in said.stderr and "--overwrite" not in again:
            sentence(said)
            whole_or_absent(place.room, name, before, whole)
            if not done and "match" in name and ("anchor" in said.stderr or "maps" in said.stderr):
                raise Finding(f"does not know its own output: {said.stderr.strip()[-200:]}")
            _, answer = watched([*again, "--overwrite"], place.room)
            said = answer[0] if answer else Said(-1, "", "it died")
        if said.code or said.trace:
            raise Finding(f"does not go on: {said.trace or said.stderr.strip()[-300:]}")
        inputs_kept(before, place.room)
        same(place.room, whole)
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    return Outcome(OK, "", tried)


def limited(size: int) -> Any:
    def act(_: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return act


def try_full(case: Case, place: Place) -> Outcome:
    """Let a run find the disk full at one moment, or its files bounded, and see that nothing is left or lost."""
    name, whole, at = chosen(case, place, (OPEN, WRITE, FOLDER, RENAME, SYNC))
    words, rng = world(place.room, place.shared, name), case.draw()
    by_limit = rng.random() < 0.25
    size = rng.choice([0, 1, 100, 1000, rng.randrange(20_000)])
    how = f"no file over {size} bytes" if by_limit else f"disk full at moment {at} of {len(whole.moments)} " \
        f"({whole.moments[at]})"  # fmt: skip
    tried = f"{how}: {shown(words, place.room)}"
    before = listing(place.room)
    try:
        _, answer = watched(words, place.room, 0 if by_limit else at, limited(size) if by_limit else full)
        if answer is None:
            raise Finding("it died")
        said = answer[0]
        if said.code == 0 and not said.trace:  # what could not be written was not needed
            same(place.room, whole)
            return Outcome(OK, "", tried)
        sentence(said)
        if SCENARIOS[name].resumes and any(place.room.rglob(".*.units")):  # what a run without a fault goes on from
            inputs_kept(before, place.room)
            answer = watched([*words, "--resume"], place.room)[1]
            if answer is None or answer[0].code:
                raise Finding(f"does not go on: {answer and answer[0].stderr.strip()[-300:]}")
            same(place.room, whole)
        else:
            refuse_changes(before, place.room)
        if not by_limit and "disk is full" not in said.stderr and os.strerror(errno.ENOSPC) not in said.stderr:
            raise Finding(f"does not say that the disk is full: {said.stderr.strip()}")
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    return Outcome(REFUSED, said.stderr.strip().removeprefix("error: "), tried)


def set_aside(said: Said, room: Path) -> list[Path]:
    """Return the paths under which a run says that it kept what it could not put into place."""
    named = said.stderr.partition("what was written is kept: ")[2].strip()
    found = [Path(path) for path in named.split(", ") if path]
    for path in found:
        if not path.is_relative_to(room) or not path.exists():
            raise Finding(f"it says that it kept '{path}', which is not there")
    return found


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def waiting(work: Callable[[], object]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Fork a process that waits. Returns what has it do `work`, and wait until it has, and what ends it."""
    told, telling = os.pipe()
    heard, hearing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(telling)
        os.close(heard)
        try:
            if os.read(told, 1):
                work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(told)
    os.close(hearing)

    def go() -> None:
        os.write(telling, b"x")
        os.read(heard, 1)  # ends with the other process

    def end() -> None:
        os.close(telling)
        os.waitpid(child, 0)
        os.close(heard)

    return go, end


def try_writers(case: Case, place: Place) -> Outcome:
    """Let another run, or a foreign program, write to the same output while a run is on the way to it."""
    name, whole, at = chosen(case, place)
    words, rng = world(place.room, place.shared, name), case.draw()
    out = Path(words[words.index("-o") + 1])
    foreign = rng.random() < 0.4
    swap = {"world/a": "world/b", "world/b": "world/a"} if rng.random() < 0.5 and "--adapter" not in words else {}
    rival = [swap.get(word, word) for word in words]
    noted = place.room.with_name(place.room.name + ".rival")
    go, end = waiting(lambda: noted.write_bytes(pickle.dumps(run(rival))))

    def act(_: str) -> None:
        if not foreign:
            go()
        elif not out.exists():
            out.mkdir(parents=True)
            (out / "notes.txt").write_text("mine")
            noted.write_bytes(b"new")

    doing = "a foreign folder appears" if foreign else f"another run: {shown(rival, place.room)}"
    tried = f"at moment {at} of {len(whole.moments)} ({whole.moments[at]}) {doing}: {shown(words, place.room)}"
    before = listing(place.room)
    try:
        _, answer = watched(words, place.room, at, act)
        end()
        if answer is None:
            raise Finding("it died")
        said = answer[0]
        inputs_kept(before, place.room)
        if foreign:
            appeared = noted.is_file()
            if said.trace or said.code not in (0, 2):
                raise Finding(f"exit code {said.code}: {said.trace or said.stderr[-200:]}")
            if appeared and not (out / "notes.txt").is_file():
                raise Finding("a folder that appeared during the run was replaced, with the files in it")
            if appeared and said.code == 2:
                sentence(said)
                for path in [out, *set_aside(said, place.room)]:
                    removed(path)
                if SCENARIOS[name].resumes:
                    for path in place.room.rglob(".*.units"):
                        removed(path)
                for path in ("world/new", "world/other"):  # which could not be removed while the others stood there
                    with suppress(OSError):
                        (place.room / path).rmdir()
                refuse_changes(before, place.room)
            else:
                same(place.room, whole)
            return Outcome(REFUSED if said.code else OK, said.stderr.strip().removeprefix("error: "), tried)
        both = [said, *([pickle.loads(noted.read_bytes())] if noted.is_file() else [])]
        for one in both:
            if one.code or one.trace:
                sentence(one)
                for path in set_aside(one, place.room):
                    removed(path)
        winners = [one for one in both if one.code == 0]
        if not winners:
            raise Finding("neither writes: " + " / ".join(one.stderr.strip()[-150:] for one in both))
        if len(winners) == 2 and "--overwrite" not in words:
            raise Finding("both say that they wrote the output, of which one is gone")
        names = {path for path in listing(place.room) if Path(path).parts[0] == "world"}
        expected = {path for path in whole.files if Path(path).parts[0] == "world"}
        if names != expected:
            raise Finding(f"left over or lost: {', '.join(sorted(names ^ expected)[:4])}")
        if rival == words:
            same(place.room, whole)
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    finally:
        noted.unlink(missing_ok=True)
    return Outcome(OK, "", tried)


KINDS = {"kill": try_kill, "full": try_full, "writers": try_writers}
