# SPDX-License-Identifier: Apache-2.0
"""Forward passes that pause, so that several models run through their layers in step on several batches.

A paused pass holds just what its remainder needs, so nothing is computed twice or stored separately. Each pass is a
thread, but only one runs at a time, while its `advance` waits for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from onebasin.models import ModelError
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call, hooks, run

_current = threading.local()


class _Stopped(BaseException):
    """Raised in a pass to unwind it."""


class Pass:
    """One call of `function` inside `context`, stopped at every `pause` in it.

    result: its return value, once `advance` has returned None. held, counts: state for hooks.
    """

    def __init__(self, function: Callable[[], Any], context: AbstractContextManager[Any]) -> None:
        self.result: Any = None
        self._function, self._context = function, context
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
        event, self._event = self._event, None
        return event

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
                with self._context:
                    self.result = self._function()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._here.release()


def current() -> Pass:
    """Return the pass in whose thread this is called."""
    found: Pass = _current.at
    return found


def pause(event: list[Any]) -> None:
    """Return `event` from `advance`, and wait for the next call of it. The list is emptied: a paused pass does not hold
    what it has shown."""
    here = current()
    here._event = tuple(event)
    event.clear()
    here._here.release()
    here._go.acquire()
    if here._stopped:
        raise _Stopped


@dataclass(frozen=True)
class Seen:
    """A call of a linear layer in a paused pass.

    inputs, output: of the layer. value: the output, or the input of a norm that contains it; changes to it reach the
    rest of the pass. version: of the inputs, which changes with them.
    """

    inputs: Tensor
    output: Tensor
    value: Tensor
    version: int

    def asked(self, times: int) -> Tensor:
        """Return the outputs that are compared, with a share of the rest of the value."""
        return self.value if times == 1 or self.output is self.value else self.output.lerp(self.value, 1 / times)

    def same_inputs(self, other: Seen) -> bool:
        """Return whether both layers were given the same tensor, unchanged."""
        return self.inputs is other.inputs and self.version == other.version


class Walk:
    """One model's passes over all batches inside `context`, which pause at every call that is measured."""

    def __init__(
        self,
        stock: LoadedModel,
        calls: Sequence[Call],
        batches: Sequence[Batch],
        context: AbstractContextManager[Any],
    ) -> None:
        of_module: dict[str, list[Call]] = {}
        for call in calls:
            of_module.setdefault(call.module, []).append(call)

        def returned(name: str) -> Callable[[Tensor, Tensor], None]:
            def look(x: Tensor, y: Tensor) -> None:
                here = current()
                call = of_module[name][here.counts[name]]
                here.counts[name] += 1
                if call.norm:
                    here.held[call.norm] = (call, x, y)
                else:
                    pause([call, x, y, y])

            return look

        def called(name: str) -> Callable[[Tensor], None]:
            def look(n: Tensor) -> None:
                if name in current().held:
                    pause([*current().held.pop(name), n])

            return look

        norms = {call.norm for call in calls if call.norm}
        self._hooks = hooks(stock, {name: returned(name) for name in of_module}, {name: called(name) for name in norms})
        self._hooks.__enter__()
        self._passes = [Pass(partial(run, stock, batch), context) for batch in batches]
        self._left = [len(calls)] * len(batches)

    def advance(self, number: int, call: Call) -> Seen:
        """Advance the pass over a batch to `call`."""
        event = self._passes[number].advance()
        if event is None or event[0] != call:
            raise ModelError(f"the models do not run their layers in the same order, from '{call.module}' on")
        self._left[number] -= 1
        if not self._left[number]:
            self._passes[number].close()  # nobody needs the end
        _, x, y, value = event
        return Seen(x, y, value, x._version)

    def close(self) -> None:
        """Unwind the passes."""
        for one in self._passes:
            one.close()
        self._hooks.__exit__(None, None, None)
