# SPDX-License-Identifier: Apache-2.0
"""A seeded campaign of bad and unusual input, kills and full disks, run as `python -m fuzz`. See docs/reliability.md.

A development tool outside the package. Every case has an id, from which `--case` makes it again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["ONEBASIN_CACHE"] = ""  # cases leave nothing for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # cases run side by side, on tiny models
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # tiny models of every family
