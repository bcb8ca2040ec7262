"""Signals that ask a run to stop, and what they do not touch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from eth_cli.launch.interrupts import RunStoppedError, counted


@pytest.fixture(autouse=True)
def _handlers_kept() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    first = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, where the tests run under nohup
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, first, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_counted_and_the_first_is_known(number: signal.Signals) -> None:
    with counted() as interrupts:
        assert (interrupts.count, interrupts.first) == (0, None)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupts.count, interrupts.first) == (2, number)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with counted() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "Ctrl-C: stopped"),
        (signal.SIGTERM, 143, "SIGTERM: stopped"),
        (signal.SIGHUP, 129, "SIGHUP: stopped"),
    ],
)
def test_the_exit_code_tells_the_signal(number: signal.Signals, code: int, words: str) -> None:
    error = RunStoppedError("stopped", by=number)
    assert (error.exit_code, str(error)) == (code, words)
