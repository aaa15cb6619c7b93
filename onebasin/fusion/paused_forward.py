# SPDX-License-Identifier: Apache-2.0
"""Forward passes that pause, so that several models run through their layers in step on several batches.

A paused pass holds just what its remainder needs, so nothing is computed twice or stored separately. Each pass is a
thread, but only one runs at a time, while its `advance` waits for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_current = threading.local()


class _Stopped(BaseException):
    """Raised in a pass to unwind it."""


class Pass:
    """One call of `function`, stopped at every `pause` inside it.

    result: its return value, once `advance` has returned None. held, counts: state for hooks.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self._function = function
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self._event: tuple[Any, ...] | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self.held: dict[str, tuple[Any, ...]] = {}
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> tuple[Any, ...] | None:
        """Run to the next pause and return its event, or None at the end. Raises whatever the pass raises."""
        self._go.release()
        self._here.acquire()
        if self._error is not None:
            raise self._error
        return self._event

    def close(self) -> None:
        """Unwind the pass, wherever it is."""
        self._stopped = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        _current.at = self
        self._go.acquire()
        try:
            if not self._stopped:
                self.result = self._function()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._event = None
        self._here.release()


def current() -> Pass:
    """Return the pass in whose thread this is called."""
    found: Pass = _current.at
    return found


def pause(*event: Any) -> None:
    """Return `event` from `advance`, and wait for the next call of it."""
    here = current()
    here._event = event
    here._here.release()
    here._go.acquire()
    if here._stopped:
        raise _Stopped
