# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium, where the machine has one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def look(folder: Path, frame: str, page: str, width: int, dark: bool) -> dict[str, Any]:
    """Return what a frame notes of a page in `data-seen`; the console has to stay silent.

    frame: HTML with places for `width` and `page`.
    """
    file = folder / "frame.html"
    file.write_text(frame.format(width=width, page=html.escape(page, quote=True)), "utf-8")
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
             "--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}", file.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:]
    seen: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return seen


def assert_scheme(seen: dict[str, Any], dark: bool) -> None:
    """Light words on dark paper, or dark words on light."""
    ink, paper = (sum(map(float, re.findall(r"[\d.]+", seen[name])[:3])) / 3 for name in ("ink", "paper"))
    assert (ink > 180 and paper < 60) if dark else (ink < 60 and paper > 200)
