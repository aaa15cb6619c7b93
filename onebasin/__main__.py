# SPDX-License-Identifier: Apache-2.0
"""The program: `onebasin`, or `python -m onebasin`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C ends it at once with exit code 130 until a command runs, which then answers it."""
    _wait_briefly()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _leave)
    from onebasin.cli import app  # after that, since imports take their time

    app()


def _wait_briefly() -> None:
    """Let threads that share an operation look 5,000 times whether the others are done before they sleep, not 300,000.

    Beside another program, waiting threads take the core that the last working one needs: learned matching took over
    four times as long (docs/performance.md). OpenMP reads this once, when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _leave(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)  # as shells do; a KeyboardInterrupt could arise where an import takes it for another error


if __name__ == "__main__":
    main()
