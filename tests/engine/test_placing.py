# SPDX-License-Identifier: Apache-2.0
"""Outputs take their places together, or not at all; what the dead leave is removed, what the living need is not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from onebasin.engine import Appeared, Placing, filesystem, placed_by, placing
from onebasin.engine.placing import hidden, tidy

pytestmark = pytest.mark.usefixtures("system")


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mark").write_text(text)
    return folder


def texts(folder: Path) -> dict[str, str]:
    """What stands in a folder, hidden things included."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(room: Path, text: str, replace: bool = False) -> None:
    with Placing() as placing:
        fill(placing.folder(room / "out", "mark" if replace else None), text)
        placing.file(room / "deep" / "maps", replace).write_text(text)


def test_all_or_none(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Placing() as placing:
        fill(placing.folder(tmp_path / "out"), "new")
        placing.file(tmp_path / "deep" / "maps").write_text("new")
        raise KeyError
    assert not list(tmp_path.iterdir())
    write(tmp_path, "new")
    assert texts(tmp_path) == {"out/mark": "new", "deep/maps": "new"}
    write(tmp_path, "newer", replace=True)
    assert texts(tmp_path) == {"out/mark": "newer", "deep/maps": "newer"}


@pytest.mark.parametrize("replace", [False, True])
def test_what_has_come_to_be_stays_and_the_others_do_not_appear(tmp_path: Path, replace: bool) -> None:
    if replace:
        write(tmp_path, "old")
    with pytest.raises(Appeared, match=r"appeared .* is kept: .*out-1, .*maps-1\.txt$"), Placing() as placing:
        fill(placing.folder(tmp_path / "out", "mark" if replace else None), "new")
        placing.file(tmp_path / "maps.txt", replace).write_text("new")
        foreign = tmp_path / "out"
        if replace:
            (foreign / "mark").unlink()
        foreign.mkdir(exist_ok=True)
        (foreign / "letter").write_text("dear")
    found = texts(tmp_path)
    assert found.pop("deep/maps", "old") == "old"
    assert found == {"out/letter": "dear", "out-1/mark": "new", "maps-1.txt": "new"}


def test_a_rename_that_fails_brings_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "old")
    put = placing._put

    def failing(one: placing._Staged) -> None:
        if one.out.name == "out":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        put(one)

    monkeypatch.setattr(placing, "_put", failing)
    with pytest.raises(OSError, match=r"^cannot write '.*out': Input/output error$"):
        write(tmp_path, "new", replace=True)
    assert texts(tmp_path) == {"out/mark": "old", "deep/maps": "old"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_the_dead_left_is_removed_and_nothing_of_the_living(tmp_path: Path) -> None:
    if filesystem.fcntl is None:
        pytest.skip("without locks nobody can tell the dead from the living")
    out = tmp_path / "out"
    for name in ("out", "other"):
        in_a_fork(lambda name=name: Placing().folder(tmp_path / name))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    (tmp_path / ".out.units").mkdir()
    (tmp_path / ".out.1-abc").mkdir()  # no name of ours
    with Placing() as living:
        mine = fill(living.folder(out), "living")
        in_a_fork(lambda: tidy(out))
        assert (mine / "mark").read_text() == "living"
    rest = {path.name for path in tmp_path.iterdir()}
    assert rest == {"out", ".out.units", ".out.1-abc", next(name for name in left if name.startswith(".other"))}


def test_a_text_that_cannot_be_written_replaces_none(tmp_path: Path) -> None:
    placing.appearing_text(tmp_path / "a.json", "before")
    with pytest.raises(UnicodeEncodeError):
        placing.appearing_text(tmp_path / "a.json", "some of it, then \ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def in_a_fork(work: Callable[[], object]) -> None:
    """Do this in a process that is then killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_stood_there_is_put_back_after_a_kill_in_the_midst_of_a_swap(tmp_path: Path) -> None:
    write(tmp_path, "old")

    def killed() -> None:
        filesystem._renameat2 = lambda *_: False
        rename, calls = os.rename, []

        def second(*names: Path) -> None:
            calls.append(names)
            if len(calls) == 3:  # the file's, and the folder's out of its place
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*names)

        os.rename = second
        write(tmp_path, "new", replace=True)

    in_a_fork(killed)
    assert not (tmp_path / "out").exists()
    tidy(tmp_path / "out")
    assert texts(tmp_path / "out") == {"mark": "old"}
    tidy(tmp_path / "out")
    assert {"deep", "out"} <= {path.name for path in tmp_path.iterdir()}
    if filesystem.fcntl is not None:  # else nobody knows what the rest belongs to
        assert len(list(tmp_path.iterdir())) == 2


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(hidden(tmp_path / "out", "1-0123abcd"), "half")
    monkeypatch.setattr(filesystem, "fcntl", None)
    write(tmp_path, "new")
    assert texts(tmp_path) == {"out/mark": "new", "deep/maps": "new", ".out.1-0123abcd/mark": "half"}


def test_the_journal_knows_its_own_until_they_change(tmp_path: Path) -> None:
    journal, out, file = tmp_path / "placed", tmp_path / "out", tmp_path / "maps"
    assert placed_by(journal) == set()
    with Placing(journal) as placing:
        fill(placing.folder(out), "new")
        placing.file(file).write_text("new")
    assert placed_by(journal) == {out, file}
    (out / "letter").write_text("dear")
    file.unlink()
    assert placed_by(journal) == set()
    journal.write_text('[["half')
    assert placed_by(journal) == set()


def test_everything_is_flushed_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut between any two of these leaves the old or the new, whole."""
    done: list[str] = []
    fsync, put = os.fsync, placing._put

    def flushed(opened: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        fsync(opened)

    def renamed(one: placing._Staged) -> None:
        done.append(f"rename {one.out.name}")
        put(one)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(placing, "_put", renamed)
    with Placing(tmp_path / "placed") as one:
        folder = fill(one.folder(tmp_path / "out"), "new")
        (folder / "deep").mkdir()
        (folder / "deep" / "inner").write_text("new")
    assert set(done[:4]) == {"mark", "inner", "deep", folder.name}
    assert done.index("inner") < done.index("deep") < done.index(folder.name)
    assert done[4:] == ["placed", tmp_path.name, "rename out", tmp_path.name]


def test_long_names_of_any_script(tmp_path: Path) -> None:
    for name in ("x" * 250, "模" * 80):
        write(tmp_path / name, "new")
        with Placing() as placing:
            fill(placing.folder(tmp_path / "rooms" / name), name)
    assert len({hidden(tmp_path / ("x" * 240 + end), "units") for end in "ab"}) == 2
