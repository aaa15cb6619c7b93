# SPDX-License-Identifier: Apache-2.0
"""Hub ids are models wherever folders are, outputs can be uploaded, and without a hub the sentence is clear.

The client reads its settings when it is imported, so these commands run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, serving
from pairs import weights
from torch import equal


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    from pairs import folder

    where = tmp_path_factory.mktemp("hub")
    held = {}
    for seed, name in enumerate(["a", "b", "old"]):
        found = folder(where / name, seed=seed)
        held[name] = {path.name: path.read_bytes() for path in found.iterdir()}
    repositories = {"someone/a": {"main": held["a"], "v1": held["old"]}, "someone/b": {"main": held["b"]}}
    with serving(Hub(repositories)) as running:
        running.folder = where  # type: ignore[attr-defined]
        yield running


def run(where: Path, address: str, *words: str, offline: bool = False) -> Any:
    """Several commands in one process, which imports once; their exit codes are lines of stderr."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(where / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x",
                "HF_HUB_OFFLINE": str(int(offline)), "OMP_NUM_THREADS": "1"}  # fmt: skip
    code = "import sys\nfrom onebasin.cli import app\nfor words in sys.argv[1].split(';'):\n" \
           "    print(app(words.split(), standalone_mode=False) or 0, file=sys.stderr)"  # fmt: skip
    return subprocess.run([sys.executable, "-c", code, ";".join(words)], cwd=where, capture_output=True, text=True,
                          env={**os.environ, **settings}, timeout=120)  # fmt: skip


def test_models_come_from_the_hub_and_go_there(hub: Hub, tmp_path: Path) -> None:
    found = run(
        tmp_path, hub.address,
        "merge someone/a someone/b -o merged --match none --push-to-hub someone/merged --json",
        "distance someone/a@v1 someone/b --json", "inspect someone/none", "inspect someone/a@v9",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    errors = [line for line in found.stderr.splitlines() if line.startswith("error")]
    assert [line for line in found.stderr.splitlines() if line.isdigit()] == ["0", "0", "2", "2"]
    assert all(f"there is no folder '{name}', and fetching it from the hub failed" in line
               for name, line in zip(("someone/none", "someone/a@v9"), errors, strict=True))  # fmt: skip
    merged, distance = map(json.loads, found.stdout.splitlines())
    assert merged["hub"] == f"{hub.address}/someone/merged"
    a, b = (weights(hub.folder / name) for name in "ab")  # type: ignore[attr-defined]
    for name, tensor in weights(tmp_path / "merged").items():
        assert equal(tensor, 0.5 * a[name] + 0.5 * b[name])
    here = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert hub.uploaded["someone/merged"] == here
    card = here["README.md"].decode()
    assert '- "someone/a"\n- "someone/b"' in card
    old, b = weights(hub.folder / "old"), b  # type: ignore[attr-defined]
    wanted = sum(float((old[name] - b[name]).double().square().sum()) for name in old) ** 0.5
    assert distance["distance"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("offline", [True, False])
def test_no_hub_is_one_sentence(offline: bool, hub: Hub, tmp_path: Path) -> None:
    """By choice, or because nothing listens there."""
    address = hub.address if offline else "http://127.0.0.1:9"
    error, code = run(tmp_path, address, "inspect someone/a", offline=offline).stderr.splitlines()
    assert code == "2"
    assert error.startswith("error: there is no folder 'someone/a', it is not in the hub's cache, and the hub cannot")
