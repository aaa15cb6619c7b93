# SPDX-License-Identifier: Apache-2.0
"""Every case runs in a fork of this process, which has imported everything: 20 ms instead of seconds.

A case that hangs, takes too much memory or dies takes nothing else with it, and what it changes in a module is gone.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import FINDING, Case, Finding, Outcome, Place, Run

CPU_SECONDS = 60  # that a case may compute: most take half a second
WALL_SECONDS = 300  # that it may take on a busy machine
MEMORY = 6 << 30  # bytes of addresses beyond those that the imports took
LARGEST = 1 << 28  # bytes of a file: no case writes a megabyte


@dataclass
class Running:
    case: Case
    place: Place
    began: float


def limit() -> None:
    """Bound what this process may take, as a machine would."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run `work` in a fork and return its wait status and what it returned (None where it did not get so far)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(work()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, pickle.loads(said) if said else None


def campaign(
    cases: Iterable[Case], kinds: dict[str, Run], scratch: Path, workers: int, keep: bool = False
) -> Iterator[tuple[Case, Outcome, float]]:
    """Run the cases, `workers` at a time, and yield each with its outcome and its seconds, as they end."""
    shared = scratch / "shared"
    shared.mkdir(exist_ok=True)
    waiting, running = iter(cases), dict[int, Running]()
    more = True
    try:
        while more or running:
            while more and len(running) < workers:
                case = next(waiting, None)
                if case is None:
                    more = False
                    break
                place = Place(scratch / str(case), shared)
                shutil.rmtree(place.room, ignore_errors=True)
                place.room.mkdir()
                running[_start(case, kinds[case.kind], place)] = Running(case, place, time.monotonic())
            if not running:
                continue
            ended, status = _wait(running)
            job = running.pop(ended)
            _end_group(ended)
            outcome = _outcome(job, status)
            if not keep:
                shutil.rmtree(job.place.room, ignore_errors=True)
                _beside(job.place).unlink(missing_ok=True)
            yield job.case, outcome, time.monotonic() - job.began
    finally:
        for pid in running:
            _end_group(pid)
            os.waitpid(pid, 0)


def _beside(place: Place) -> Path:
    return place.room.with_name(place.room.name + ".said")


def _start(case: Case, run: Run, place: Place) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()  # what it starts ends with it
        said = os.open(_beside(place), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        limit()
        temporary = place.room / "tmp"
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        os.environ["TMPDIR"] = str(temporary)
        try:
            outcome = run(case, place)
        except Finding as finding:
            text, _, tried = str(finding).partition("\n")
            outcome = Outcome(FINDING, text, tried)
        _answer(place).write_bytes(pickle.dumps(outcome))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _answer(place: Place) -> Path:
    return place.room / "outcome"


def _wait(running: dict[int, Running]) -> tuple[int, int]:
    while True:
        for pid, job in running.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return ended, status
            if time.monotonic() - job.began > WALL_SECONDS:
                _end_group(pid)
        time.sleep(0.005)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _outcome(job: Running, status: int) -> Outcome:
    answer = _answer(job.place)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and answer.is_file():
        found: Outcome = pickle.loads(answer.read_bytes())
        return found
    said = _beside(job.place).read_text(errors="replace").strip().splitlines() if _beside(job.place).is_file() else []
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        long = name in ("SIGXCPU", "SIGKILL")
        return Outcome(FINDING, f"hang: ended after {time.monotonic() - job.began:.0f} s" if long else f"died: {name}")
    return Outcome(FINDING, f"the case itself failed: {said[-1] if said else 'no word'}")
