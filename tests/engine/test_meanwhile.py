# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from onebasin.engine import fastest_threads, meanwhile, threads


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a policy of Linux")
def test_a_patient_thread_hurries_once_somebody_waits() -> None:
    policies: list[int] = []
    begun = threading.Event()

    def work(_: threading.Event) -> int:
        policies.append(os.sched_getscheduler(0))
        begun.set()
        until = time.monotonic() + 60
        while os.sched_getscheduler(0) == policies[0] and time.monotonic() < until:
            time.sleep(0.001)
        policies.append(os.sched_getscheduler(0))
        return 7

    with meanwhile(work, patient=True) as result:
        assert begun.wait(60)
        assert result() == 7
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


@pytest.mark.parametrize("patient", [False, True])
def test_it_stops_with_the_block(patient: bool) -> None:
    turns = 0

    def work(stop: threading.Event) -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0.001)

    with meanwhile(work, patient=patient):
        while not turns:
            time.sleep(0.001)
    seen = turns
    time.sleep(0.05)
    assert turns == seen


def test_what_it_raises_reaches_who_waits() -> None:
    def work(_: threading.Event) -> None:
        raise ValueError("no")

    with meanwhile(work) as result, pytest.raises(ValueError, match="no"):
        result()


@pytest.mark.parametrize(("alone", "together", "chosen"), [(0.02, 0.1, 1), (0.1, 0.02, 2)])
def test_threads_that_hinder_each_other_do_not_compute(alone: float, together: float, chosen: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    calls: list[int] = []

    def work() -> None:
        calls.append(torch.get_num_threads())
        time.sleep(alone if calls[-1] == 1 else together)

    try:
        count, seconds = fastest_threads(work)
        assert count == chosen and seconds == pytest.approx(min(alone, together), rel=0.5)
        assert torch.get_num_threads() == 2
        with threads(count):
            assert torch.get_num_threads() == chosen
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
