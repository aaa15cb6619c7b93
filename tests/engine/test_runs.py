# SPDX-License-Identifier: Apache-2.0
"""Workers, clusters and interruptions change no byte of a result; a full disk leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import interrupted
import kills
import pytest
import torch
from damage import edit_weights
from footprint import make
from safetensors import SafetensorError
from zoo import CASES, save

import onebasin
from onebasin.engine import Cache, Store, behind, in_order, kept, on_ray, placing
from onebasin.jobs.writing import tensors_of
from onebasin.matching import Matched, Run, Weights, match_weights
from onebasin.matching.components import components_of
from onebasin.models import Canonical, Folder, ModelError, write_model
from onebasin.models import weight_files as weights
from onebasin.settings import OutputSettings
from onebasin.symmetry import acting_groups

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")  # and kills, which Windows lacks
QUICK = {"verify": "tensors", "rescale": "none", "max_sweeps": 2}
MERGE = {**QUICK, "verdict": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pair")
    return [make(folder / str(seed), 3, seed, **interrupted.SHAPE) for seed in range(2)]


@pytest.fixture(scope="module")
def whole(pair: list[Path]) -> dict[str, bytes]:
    """The weights of a merge that nothing disturbed."""
    out = pair[0].with_name("whole")
    onebasin.merge(pair, out, **MERGE)
    return interrupted.weights(out)


# --- the same bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["paper", "full"])
def test_any_number_of_workers(pair: list[Path], tmp_path: Path, level: str) -> None:
    for workers in (1, 2, 5):
        onebasin.merge(pair, tmp_path / str(workers), match=level, workers=workers, **MERGE)
    one, *others = (interrupted.weights(tmp_path / str(workers)) for workers in (1, 2, 5))
    assert one and all(other == one for other in others)


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The address of a cluster of two workers on this machine."""
    module = pytest.importorskip("ray")
    if not module.is_initialized():
        module.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield "local"
    module.shutdown()


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a task should do this")


@pytest.mark.parametrize("level", ["paper", "full"])
def test_two_local_workers_of_ray(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: str, level: str
) -> None:
    """They write the files, of which there are several, and this process writes none."""
    how = {**MERGE, "match": level, "shard_size": "200KB"}
    onebasin.merge(pair, tmp_path / "here", workers=1, **how)
    monkeypatch.setattr(weights.Shard, "add", refuse)
    onebasin.merge(pair, tmp_path / "there", ray=ray, **how)
    found = interrupted.weights(tmp_path / "here")
    assert len(found) > 3 and found == interrupted.weights(tmp_path / "there")


@forks
def test_a_worker_that_is_lost_while_it_writes(pair: list[Path], tmp_path: Path, ray: str) -> None:
    """Another one writes the file anew, and half a file is not found among the whole ones."""
    model = Folder(pair[0])
    whole = tensors_of(model, onebasin.Options(ray=ray))
    write_model(tmp_path / "here", iter(whole), model, look=OutputSettings(shard_size="200KB"))
    cut = weights.Cut(10**6, 200_000)
    file = weights.foreseen(weights.Target(tmp_path, tmp_path, model, None), whole, cut)[1]
    lost = tmp_path / "lost"

    def make(roles: tuple[str, ...]) -> dict[str, torch.Tensor]:
        if roles == file.groups[-1] and not lost.exists():
            time.sleep(0.2)  # until what came before is in the file
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole.make(roles)

    assert len(file.groups) > 2
    write_model(tmp_path / "there", replace(whole, make=make), model, look=OutputSettings(shard_size="200KB"))
    assert lost.exists()
    assert interrupted.weights(tmp_path / "here") == interrupted.weights(tmp_path / "there")
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        path.name for path in (tmp_path / "there").iterdir()
    }


@forks
def test_a_worker_that_is_lost_in_the_middle_of_a_sweep(tmp_path: Path, ray: str) -> None:
    """Another one begins anew, and finds the same maps of all twelve layers as one process does."""
    pair = [Folder(make(tmp_path / str(seed), 12, seed, **interrupted.SHAPE)) for seed in range(2)]
    source, anchor = (Canonical(model) for model in pair)
    lost, asked, here = tmp_path / "lost", list[str](), os.getpid()

    def read(role: str) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(role)
        if os.getpid() != here and len(asked) == half and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return anchor.read(role), source.read(role)

    groups, how = acting_groups(source.signature, "full"), Weights(max_sweeps=2)
    found = [match_weights(source.signature, read, groups, how, run=Run(workers=1))]
    half = len(asked) // 2
    asked.clear()
    found.append(match_weights(source.signature, read, groups, how, run=Run(workers=1, ray=ray)))
    assert lost.exists() and len(found[0].objective) == 3
    for name, one in zip(("here", "there"), found, strict=True):
        one.save(tmp_path / name)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_an_error_of_one_task_ends_the_others(tmp_path: Path, ray: str) -> None:
    def work(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError
        (tmp_path / f"begun-{number}").touch()
        time.sleep(2 * number)
        (tmp_path / f"done-{number}").touch()

    with pytest.raises(ZeroDivisionError):
        list(on_ray(work, [0, 1, 5, 6], ray))
    assert (tmp_path / "done-0").exists()
    assert not (tmp_path / "done-5").exists() and not (tmp_path / "done-6").exists()


@pytest.mark.parametrize("limit", ["1B", "3KB", "5GB"])
@pytest.mark.parametrize("case", ["MixtralForCausalLM", "GPT2LMHeadModel", "BertForSequenceClassification"])
def test_files_are_foreseen_from_shapes(case: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File by file gives the same bytes as one after the other, also where experts are made at once but stored apart,
    and where tensors are only copied."""
    folder = save(CASES[case](), tmp_path / "model")
    if case == "GPT2LMHeadModel":
        edit_weights(folder, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(8, 8).bool()}))
    model = Folder(folder)
    assert len(list(model.others())) == (case == "GPT2LMHeadModel")
    making = tensors_of(model, onebasin.Options(ray="none"))
    write_model(tmp_path / "one", iter(making), model, dtype=torch.bfloat16, look=OutputSettings(shard_size=limit))

    def backwards(run: Callable[[object], object], items: list[object], address: str) -> list[object]:
        return [run(item) for item in reversed(items)][::-1]

    monkeypatch.setattr(weights, "on_ray", backwards)
    write_model(tmp_path / "two", making, model, dtype=torch.bfloat16, look=OutputSettings(shard_size=limit))
    found = interrupted.weights(tmp_path / "one")
    assert found and found == interrupted.weights(tmp_path / "two")
    assert set(model.others()) <= Folder(tmp_path / "one").files.keys()


def test_no_worker_and_no_ray(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        onebasin.merge(pair, tmp_path / "out", workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="pip install"):
        onebasin.merge(pair, tmp_path / "out", ray="auto", **MERGE)
    assert not list(tmp_path.iterdir())


# --- two writers, and what a killed one leaves ------------------------------------------------------


def test_a_second_run_with_the_same_output_is_refused(
    pair: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """While the first is at work, and the first loses nothing."""
    out, said = tmp_path / "out", []

    def second(line: str) -> None:
        if not said and any((tmp_path / ".out.units").iterdir()):
            with pytest.raises(ValueError) as refused:
                onebasin.merge(pair[::-1], out, **MERGE)
            said.append(str(refused.value))

    onebasin.merge(pair, out, tell=second, **MERGE)
    assert said and all("another run is using" in line for line in said)
    assert interrupted.weights(out) == whole


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_during_the_run_stays_as_it_is(
    pair: list[Path], whole: dict[str, bytes], tmp_path: Path, overwrite: bool
) -> None:
    """The finished work is kept beside it, and the message says where."""
    out = tmp_path / "out"

    def letter(line: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "letter").write_text("dear")

    with pytest.raises(ValueError, match=r"appeared while this command ran.* is kept: .*out-1$"):
        onebasin.merge(pair, out, tell=letter, overwrite=overwrite, **MERGE)
    assert [path.name for path in out.iterdir()] == ["letter"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-1"}
    assert interrupted.weights(tmp_path / "out-1") == whole


@forks
def test_a_resumed_run_removes_what_the_killed_one_left(pair: list[Path], tmp_path: Path) -> None:
    def killed() -> None:
        placing.flush = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        onebasin.merge(pair, tmp_path / "out", **{**MERGE, "match": "none"})

    in_a_fork(killed)
    left = [path.name for path in tmp_path.iterdir()]
    assert any(name.startswith(".out.") and name != ".out.units" for name in left)
    onebasin.merge(pair, tmp_path / "out", resume=True, **MERGE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def in_a_fork(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert not interrupted.finished(child)


@forks
def test_a_kill_between_the_anchor_and_the_output_is_resumed(pair: list[Path], tmp_path: Path) -> None:
    """The anchor in canonical form stands; the resumed run knows it for its own, and another one's it does not."""
    out, how = tmp_path / "out", {**QUICK, "symmetry": "full", "max_sweeps": 1}

    def killed() -> None:
        real, calls = placing._put, []

        def put(one: object) -> None:
            calls.append(one)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(one)

        placing._put = put
        onebasin.match(*pair, out, **how)

    in_a_fork(killed)
    anchor, units = tmp_path / "out-anchor", tmp_path / ".out.units"
    assert anchor.exists() and not out.exists()
    found = sorted(units.iterdir())
    assert len(found) > 1
    with pytest.raises(ValueError, match="out-anchor' exists"):
        onebasin.match(*pair, out, **how)
    assert sorted(units.iterdir()) == found  # a refusal removes no work
    (anchor / "letter").write_text("dear")  # now it is somebody's
    with pytest.raises(ValueError, match="out-anchor' exists"):
        onebasin.match(*pair, out, resume=True, **how)
    assert sorted(units.iterdir()) == found and (anchor / "letter").exists()
    shutil.rmtree(anchor)

    in_a_fork(killed)
    onebasin.match(*pair, out, resume=True, **how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-anchor"]


@forks
@pytest.mark.parametrize("system", ["", "bare"])
def test_kills_at_renames_and_flushes(tmp_path: Path, system: str) -> None:
    """At every seventh of them; `python tests/engine/kills.py FOLDER` takes all."""
    told = tmp_path / "told"
    assert interrupted.finished(interrupted.forked(lambda: told.write_text(str(kills.main(tmp_path, bool(system), 7)))))
    assert int(told.read_text()) > 8


# --- interruptions ----------------------------------------------------------------------------------


@forks
def test_kills_at_random_moments(tmp_path: Path) -> None:
    told = tmp_path / "told"
    run = partial(interrupted.main, tmp_path, 3)
    assert interrupted.finished(interrupted.forked(lambda: told.write_text(json.dumps(run()))))
    seen = json.loads(told.read_text())
    assert seen["none"] + seen["complete"] == 3


@pytest.mark.parametrize("level", ["paper", "full"])
def test_finished_units_are_not_done_again(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Interrupted after the last unit, or sweep: the resumed run solves nothing, and writes the same bytes."""
    onebasin.merge(pair, tmp_path / "whole", match=level, **MERGE)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("onebasin.jobs.merge.write_into", interrupt)
        onebasin.merge(pair, tmp_path / "out", match=level, **MERGE)
    assert not (tmp_path / "out").exists() and list((tmp_path / ".out.units").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr("onebasin.matching.coordinate_descent.CoordinateDescent._best", interrupt)
        onebasin.merge(pair, tmp_path / "out", match=level, resume=True, **MERGE)
    assert interrupted.weights(tmp_path / "out") == interrupted.weights(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_a_descent_goes_on_from_its_last_sweep(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = onebasin.match(*pair, tmp_path / "whole", symmetry="full", **{**QUICK, "max_sweeps": 4})
    put = Store.put
    sweeps = []

    def interrupt(self: Store, unit: str, write: object) -> None:
        put(self, unit, write)
        sweeps.append(unit)
        if len(sweeps) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Store, "put", interrupt)
        onebasin.match(*pair, tmp_path / "out", symmetry="full", **{**QUICK, "max_sweeps": 4})
    found = onebasin.match(*pair, tmp_path / "out", symmetry="full", resume=True, **{**QUICK, "max_sweeps": 4})
    assert found["objective"] == whole["objective"] and len(whole["objective"]) > 3
    assert interrupted.weights(tmp_path / "out") == interrupted.weights(tmp_path / "whole")


def test_units_of_other_inputs_are_not_found(pair: list[Path], tmp_path: Path) -> None:
    """Another option, and another model of the same name: what was kept does not count."""
    other = make(tmp_path / "other", 3, 7, **interrupted.SHAPE)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("onebasin.jobs.merge.write_into", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        onebasin.merge(pair, out, **MERGE)
    onebasin.merge([other, pair[1]], out, resume=True, **MERGE)
    onebasin.merge([other, pair[1]], tmp_path / "fresh", **MERGE)
    assert interrupted.weights(out) == interrupted.weights(tmp_path / "fresh")


def test_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "units", "inputs")
    assert store.find("one") is None
    store.put("one", lambda path: path.write_text("found") and None)
    path = store.find("one")
    assert path is not None and path.read_text() == "found"
    assert Store(tmp_path / "units", "other inputs").find("one") is None

    def failing(path: Path) -> None:
        path.write_text("half")
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        store.put("two", failing)
    assert store.find("two") is None and len(list((tmp_path / "units").iterdir())) == 1


def test_a_cache_finds_what_was_kept_of_the_same_inputs_and_nothing_that_was_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    cache = Cache("inputs")
    assert cache.find("one") is None
    cache.put("one", {"found": [1, 2.5]})
    assert cache.find("one") == Cache("inputs").find("one") == {"found": [1, 2.5]}
    assert cache.find("two") is None and Cache("other inputs").find("one") is None
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-3], whole.replace(b"1", b"7"), b"\xff" + whole, whole.replace(b"\n", b" ")):
        file.write_bytes(damaged)
        assert cache.find("one") is None
    cache.put("one", {"found": "anew"})
    assert cache.find("one") == {"found": "anew"}


def test_a_cache_that_cannot_be_kept_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder", "utf-8")
    for place in ("", str(file), str(file / "below")):
        monkeypatch.setenv("ONEBASIN_CACHE", place)
        Cache("inputs").put("one", {"found": 1})
        assert Cache("inputs").find("one") is None
    assert [*tmp_path.iterdir()] == [file] and file.read_text("utf-8") == "no folder"


def test_a_cache_lies_where_caches_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEBASIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    Cache("inputs").put("one", {"found": 1})
    assert len([*(tmp_path / "caches" / "onebasin").iterdir()]) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Cache("inputs").put("one", {"found": 2})
    assert len([*(tmp_path / "home" / ".cache" / "onebasin").iterdir()]) == 1


def test_a_refusal_removes_its_own_units_but_none_that_it_found(tmp_path: Path) -> None:
    units = tmp_path / "new" / "units"
    with pytest.raises(ValueError, match="wrong"), kept(units, resume=False):
        (units / "own").touch()
        raise ValueError("wrong")
    assert not list(tmp_path.iterdir())
    for error in (KeyboardInterrupt, OSError, RuntimeError, ValueError):  # the last finds what the others left
        with pytest.raises(error), kept(units, resume=True):
            (units / error.__name__).touch()
            raise error
    assert len(list(units.iterdir())) == 4
    with kept(units, resume=False):
        assert not list(units.iterdir())
    assert not units.exists()


# --- a full disk ------------------------------------------------------------------------------------


@forks
def test_a_limit_on_the_size_of_files(pair: list[Path], tmp_path: Path) -> None:
    """Where no file may grow beyond a few kilobytes, as under a quota: one clear sentence, and units alone are left."""
    resource = pytest.importorskip("resource")
    out = tmp_path / "new" / "out"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
            onebasin.merge(pair, out, workers=1, **MERGE)
        except ModelError as error:
            code = 0 if "cannot write" in str(error) and "\n" not in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 0
    assert [path.name for path in out.parent.iterdir()] == [".out.units"]
    onebasin.merge(pair, out, resume=True, **MERGE)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_disk_that_is_full_while_units_are_saved(
    pair: list[Path], whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence; the units before stay, and the resumed run writes what an undisturbed one does."""
    save, saved = Matched.save, []

    def full(self: Matched, path: Path) -> None:
        saved.append(path)
        if len(saved) == 3:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(self, path)

    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"^the disk is full: .* --resume\)$"):
        patched.setattr(Matched, "save", full)
        onebasin.merge(pair, out, **MERGE)
    assert not out.exists() and len(list((tmp_path / ".out.units").iterdir())) == 2
    onebasin.merge(pair, out, resume=True, **MERGE)
    assert interrupted.weights(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- units and threads ------------------------------------------------------------------------------


def test_the_parts_of_a_model_that_are_matched_by_themselves(pair: list[Path]) -> None:
    signature = onebasin.Folder(pair[0]).signature
    roles = [role for role, entry in signature.tensors.items() if entry.alias is None]
    for level, wide in (("paper", set()), ("permutation", {"stream"})):
        groups = acting_groups(signature, level)
        parts = components_of(signature, roles, groups)
        assert sorted(root for part in parts for block in part.blocks for root in block.roots) == sorted(groups)
        assert len({part.name for part in parts}) == len(parts)
        assert {root for root in groups if signature.spaces[root].layer is None} == wide
        assert (len(parts) == 1) == bool(wide)


def test_what_was_found_is_kept_exactly(pair: list[Path], tmp_path: Path) -> None:
    found = Matched(onebasin.Alignment(), 1 / 3, [0.1, 1e-17], {"role": 2 / 3})
    found.save(tmp_path / "kept")
    assert Matched.load(tmp_path / "kept") == found


def test_results_come_in_order_and_few_wait() -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    def work(number: int) -> int:
        time.sleep(0.001 * (7 - number % 7))
        return number

    def items():
        for number in range(40):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            yield number

    for number, found in enumerate(in_order(work, items(), 3)):
        with lock:
            running[0] -= 1
        assert found == number
    assert most[0] <= 2 * 3 + 1


def test_threads_and_their_errors() -> None:
    before = torch.get_num_threads()
    done: list[int] = []

    def work(number: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if number == 3:
            raise OSError("three")
        done.append(number)

    with pytest.raises(OSError, match="three"):
        behind(work, iter(range(10)))
    assert done[:3] == [0, 1, 2]
    with pytest.raises(OSError, match="three"):
        list(in_order(work, range(10), 2))
    assert torch.get_num_threads() == before


def test_threads_stay_and_a_fork_has_its_own() -> None:
    """And when a unit fails, none of the others still runs afterwards."""
    known = {thread.ident for thread in threading.enumerate()}

    def idents() -> set[int]:
        return set(in_order(lambda _: threading.get_ident(), range(20), 4)) - known

    assert len(idents() | idents() | idents()) <= 4
    if hasattr(os, "fork"):
        if not (child := os.fork()):
            signal.alarm(60)  # threads that did not come along would never answer
            os._exit([*in_order(abs, range(9), 4)] != [*range(9)])
        assert os.waitpid(child, 0)[1] == 0

    running: set[int] = set()

    def work(number: int) -> None:
        running.add(number)
        time.sleep(0.01 * number)
        if number == 1:
            raise OSError("one")
        running.remove(number)

    with pytest.raises(OSError, match="one"):
        list(in_order(work, range(1, 9), 4))
    assert running == {1}
