# SPDX-License-Identifier: Apache-2.0
"""Writing: what is read back is what was given, and a failure leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import killed
import pytest
import torch
from damage import edit_config
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from onebasin.engine import filesystem
from onebasin.models import Folder, ModelError, Target, View, write_into, write_model, writer
from onebasin.models.shards import Shard, room_for
from onebasin.running import compare
from onebasin.settings import OutputSettings

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def pairs(model: Folder) -> Iterator[tuple[str, Tensor]]:
    return ((name, model.read_name(name)) for name in model.files)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path) -> dict[str, Tensor]:
    model = Folder(folder)
    return {name: model.read_name(name).clone() for name in model.files}


def nothing_but(*kept: Path) -> None:
    """The parent of the first folder holds these and nothing else: no half model, no hidden folder."""
    assert set(kept[0].parent.iterdir()) == set(kept)


# --- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, *DTYPES])
@pytest.mark.parametrize("stored", DTYPES)
def test_dtypes_in_and_out(make, tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None) -> None:
    """Mathematics in float64 in between; the dtype on disk is the one asked for, or the one it was."""
    like = Folder(make(dtype=stored))
    out = tmp_path / "out"
    write_model(out, ((name, tensor.double()) for name, tensor in pairs(like)), like, dtype=asked)
    for name, tensor in weights(out).items():
        assert tensor.dtype == (asked or stored)
        assert torch.equal(tensor, like.read_name(name).to(tensor.dtype))
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.dtype == (asked or stored)


def test_sharded_equals_single(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)
    write_model(tmp_path / "one", pairs(like), like)
    write_model(tmp_path / "many", pairs(like), like, look=OutputSettings(shard_size=2000))
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert compare(tmp_path / "one", tmp_path / "many").max_difference == 0

    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
    assert sorted(path.name for path in (tmp_path / "many").glob("*.safetensors")) == files
    assert [path.name for path in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    for file in files:
        with safe_open(tmp_path / "many" / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]  # noqa: SIM118
            assert sum(sizes) <= 2000 or len(sizes) == 1


def test_tensors_are_taken_as_they_are_written(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one is being written, one waits, and one is made."""
    like = Folder(bert)
    taken = [0]
    ahead = []
    real = Shard.add

    def counting() -> Iterator[tuple[str, Tensor]]:
        for pair in pairs(like):
            taken[0] += 1
            yield pair

    def add(self: Shard, name: str, tensor: Tensor) -> None:
        time.sleep(0.002)  # a slow disk
        ahead.append(taken[0] - len(ahead))
        real(self, name, tensor)

    monkeypatch.setattr(Shard, "add", add)
    write_model(tmp_path / "out", counting(), like)
    assert len(ahead) == len(like.files) and max(ahead) <= 3


def test_any_reader_takes_the_files(tmp_path: Path) -> None:
    """Numbers start on whole words, whatever came before them, and nothing stands between them."""
    given = {
        "odd": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.arange(5.0, dtype=torch.float64),
        "none": torch.empty(0),
        "one": torch.tensor(7),
    }
    file = tmp_path / "some.safetensors"
    shard = Shard(file, 1000 + room_for(*given))
    for name, tensor in given.items():
        shard.add(name, tensor)
    shard.close()
    found = load_file(file)
    assert found.keys() == given.keys() and found["flags"].tolist() == [True, False, True] and found["one"] == 7
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    places = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in places] == [0, *(end for _, end in places)][:-1]
    assert places[-1][1] == len(raw) - 8 - size
    widths = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values())


def test_a_dtype_that_the_format_lacks(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)
    with pytest.raises(ValueError, match=r"'x' of torch\.complex64 cannot be stored"):
        write_model(tmp_path / "out", iter([("x", torch.ones(2, dtype=torch.complex64))]), like)
    nothing_but(bert)


def test_views_transposes_and_tied_tensors(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)
    square = torch.arange(16.0).reshape(4, 4)
    given = {
        "transposed": square.T,
        "row": square[1],
        "tied": square,
        "again": square,
        "wide": square[0].expand(3, 4),
        "empty": torch.empty(0, 2),
        "count": torch.arange(3),
        "grad": torch.nn.Parameter(square),
    }
    write_model(tmp_path / "out", iter(given.items()), like)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert found["count"].dtype == torch.int64


def test_a_buffer_that_the_caller_fills_again(bert: Path, tmp_path: Path) -> None:
    """One buffer, yielded twice with different numbers, is two tensors."""
    like = Folder(bert)

    def reused() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(3)
        for number in (1.0, 2.0):
            yield f"t{number:.0f}", buffer.fill_(number)

    write_model(tmp_path / "out", reused(), like)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["t1"].tolist() == [1, 1, 1] and found["t2"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("size", "count"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2KiB", 2048), (7, 7)])
def test_shard_sizes(size: str | int, count: int) -> None:
    assert writer.bytes_of(size) == count


@pytest.mark.parametrize("size", ["", "big", "-1", 0, "5 bananas", "0GB"])
def test_no_shard_size(bert: Path, tmp_path: Path, size: str | int) -> None:
    with pytest.raises(ModelError, match="is not a shard size"):
        write_model(tmp_path / "out", pairs(Folder(bert)), Folder(bert), look=OutputSettings(shard_size=size))
    nothing_but(bert)


# --- what stands beside the weights ----------------------------------------------------------------


def test_companions_are_copied_and_code_is_not(bert: Path, tmp_path: Path) -> None:
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "LICENSE.txt",
        "preprocessor_config.json",
        "generation_config.json",
        "additional_chat_templates/short.jinja",
    ]
    left = [
        "modeling_evil.py",
        "pytorch_model.bin",
        "README.md",
        "optimizer.pt",
        "model.onnx",
        "onebasin.json",
        "training_args.bin",
        "model-00001-of-00002.safetensors",
    ]
    for name in kept + left:
        (bert / name).parent.mkdir(exist_ok=True)
        (bert / name).write_text(f"this is {name}")
    like = Folder(bert)
    write_model(
        tmp_path / "out",
        pairs(like),
        like,
        look=OutputSettings(files={"README.md": "# A model\n", "onebasin.json": "{}"}),
    )
    found = contents(tmp_path / "out")
    assert set(found) == {*kept, "config.json", "model.safetensors", "README.md", "onebasin.json"}
    assert all(found[name] == f"this is {name}".encode() for name in kept)
    assert found["README.md"] == b"# A model\n"


def test_the_config_keeps_every_key(bert: Path, tmp_path: Path) -> None:
    edit_config(bert, odd_key={"ö": [1, None, 2.5e-7]}, id2label={"0": "nein", "1": "ja", "2": "ü"}, torch_dtype="x")
    like = Folder(bert)
    before = json.loads((bert / "config.json").read_text())
    write_model(tmp_path / "same", pairs(like), like)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == before
    updates = {"tie_word_embeddings": False, "new": 1}
    write_model(tmp_path / "new", pairs(like), View(like, updates=updates), dtype=torch.bfloat16)
    after = json.loads((tmp_path / "new" / "config.json").read_text())
    assert after == {**before, **updates, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert list(after)[: len(before)] == list(before)


def test_the_dtype_of_components(bert: Path, tmp_path: Path) -> None:
    edit_config(bert, text_config={"dtype": "float32", "deep_config": {"torch_dtype": "float32", "x": 1}})
    like = Folder(bert)
    write_model(tmp_path / "out", pairs(like), like, dtype=torch.float16)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["text_config"] == {"dtype": "float16", "deep_config": {"torch_dtype": "float16", "x": 1}}


def test_permissions_follow_the_umask(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)
    old = os.umask(0o027)
    try:
        write_model(tmp_path / "out", pairs(like), like, look=OutputSettings(shard_size=3000, files={"README.md": ""}))
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


# --- what is refused -------------------------------------------------------------------------------


def never() -> Iterator[tuple[str, Tensor]]:
    pytest.fail("work was done before the output was refused")
    yield


@pytest.mark.usefixtures("system")
def test_an_output_that_exists(make, tmp_path: Path) -> None:
    source, other = make(), make(name="other")
    before = contents(other)
    (tmp_path / "file").write_text("x")
    for out in (other, tmp_path / "file"):
        with pytest.raises(ModelError, match=r"exists; .*--overwrite"):
            write_model(out, never(), Folder(source))
    assert contents(other) == before
    nothing_but(source, other, tmp_path / "file")


@pytest.mark.usefixtures("system")
def test_overwriting(make, tmp_path: Path) -> None:
    source, old = make(), make(name="old", num_labels=5)
    (old / "stale.safetensors").write_text("x")
    like = Folder(source)
    write_model(old, pairs(like), like, overwrite=True)
    assert set(contents(old)) == {"config.json", "model.safetensors"}
    assert compare(source, old).max_difference == 0
    nothing_but(source, old)


@pytest.mark.usefixtures("system")
def test_overwriting_through_a_link_keeps_the_link(make, tmp_path: Path) -> None:
    source, old = make(), make(name="old", num_labels=5)
    (tmp_path / "link").symlink_to(old)
    like = Folder(source)
    write_model(tmp_path / "link", pairs(like), like, overwrite=True)
    assert (tmp_path / "link").is_symlink() and compare(source, old).same


@pytest.mark.usefixtures("system")
def test_what_is_no_model_folder_is_not_overwritten(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "home", tmp_path / "file", Path("/")):
        with pytest.raises(ModelError, match=r"is not a model folder|contains an input"):
            write_model(out, never(), Folder(bert), overwrite=True)
    assert (tmp_path / "home" / "letter").read_text() == "dear"


def test_inputs_are_not_overwritten(make, tmp_path: Path) -> None:
    source, other = make(), make(name="other")
    inside = other / "nested"
    other.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(other)
    source_copy = Folder(source)
    (tmp_path / "link").symlink_to(source)
    for out, inputs in ((source, []), (tmp_path / "link", []), (other, [source, other]), (other, [inside])):
        refused = pytest.raises(ModelError, match=r"contains an input|is one of the inputs")
        with refused, writer.appearing(out, True, [source_copy.folder, *inputs]):
            pytest.fail("it began to write")


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), ModelError("no")])
@pytest.mark.parametrize("where", ["tensors", "check"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_write_leaves_nothing(
    make, tmp_path: Path, where: str, error: BaseException, overwrite: bool
) -> None:
    source, old = make(), make(name="old", num_labels=5)
    like, before = Folder(source), contents(old)
    out = old if overwrite else tmp_path / "new" / "deep" / "out"

    def broken() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(pairs(like)):
            if where == "tensors" and number == 20:
                raise error
            yield pair

    with pytest.raises(type(error)), writer.appearing(out, overwrite, [source]) as folder:
        write_into(Target(folder, out, like, None), broken(), OutputSettings(shard_size=2000))
        assert compare(source, folder).same  # the folder is whole when it is checked
        raise error
    assert contents(old) == before
    nothing_but(source, old)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    like = Folder(bert)
    calls = []
    real = Shard.close

    def close(self: Shard) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise OSError(code, os.strerror(code))
        real(self)

    monkeypatch.setattr(Shard, "close", close)
    with pytest.raises(ModelError, match="the disk is full") as caught:
        write_model(tmp_path / "a" / "out", pairs(like), like, look=OutputSettings(shard_size=2000))
    assert "\n" not in str(caught.value)
    nothing_but(bert)


def test_a_disk_that_is_really_full(bert: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    half = (bert / "model.safetensors").stat().st_size // 2
    command = ["mount", "-t", "tmpfs", "-o", f"size={half}", "tmpfs", disk]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        like = Folder(bert)
        for shard_size in ("5GB", 2000):
            with pytest.raises(ModelError, match="the disk is full"):
                write_model(disk / "out", pairs(like), like, look=OutputSettings(shard_size=shard_size))
            assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_place_that_cannot_be_written(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match=r"cannot write '.*': Not a directory"):
        write_model(tmp_path / "file" / "out", pairs(Folder(bert)), Folder(bert))
    nothing_but(bert, tmp_path / "file")


def test_values_that_do_not_fit_the_dtype(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)

    def large() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs(like):
            yield name, tensor * 1e6 if "query.weight" in name else tensor

    with pytest.raises(ModelError, match=r"query.weight' is not finite in float16"):
        write_model(tmp_path / "out", large(), like, dtype=torch.float16)
    nothing_but(bert)
    write_model(tmp_path / "out", large(), like, dtype=torch.bfloat16)


def test_nothing_to_write_and_a_tensor_that_comes_twice(bert: Path, tmp_path: Path) -> None:
    like = Folder(bert)
    with pytest.raises(ModelError, match="no tensors"):
        write_model(tmp_path / "out", iter(()), like)
    with pytest.raises(ModelError, match="'x' occurs twice"):
        write_model(tmp_path / "out", iter([("x", torch.ones(2))] * 2), like)
    nothing_but(bert)


# --- kills -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("system")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_model(make, tmp_path: Path) -> None:
    new, old = make(name="new"), make(name="old", num_labels=5)
    outcomes = {}
    for moment in killed.MOMENTS:
        out = shutil.copytree(old, tmp_path / f"old-{moment}")
        killed.overwrite(new, out, moment)
        found = weights(out)
        labels = len(found["classifier.bias"])
        outcomes[moment] = "old" if labels == 5 else "new"
        expected = weights(old if labels == 5 else new)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        assert compare(old if labels == 5 else new, out).max_difference == 0
    assert outcomes["never"] == outcomes["while-removing-the-old"] == "new"
    assert {outcomes[moment] for moment in list(killed.MOMENTS)[:5]} == {"old"}


def test_without_an_atomic_exchange(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_renameat2", lambda *_: False)
    source, old = make(), make(name="old", num_labels=5)
    like, before = Folder(source), contents(old)
    real = os.rename
    renamed = []

    def rename(path: Path, target: Path) -> None:
        renamed.append(Path(path))
        if Path(path).parent == tmp_path and len([path for path in renamed if path.parent == tmp_path]) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(path, target)

    with monkeypatch.context() as failing, pytest.raises(ModelError, match="Input/output error"):
        failing.setattr(os, "rename", rename)
        write_model(old, pairs(like), like, overwrite=True)
    assert contents(old) == before  # put back
    nothing_but(source, old)
    write_model(old, pairs(like), like, overwrite=True)
    assert compare(source, old).max_difference == 0
    nothing_but(source, old)
