"""Signals that ask a run to stop: counted while it goes on, and told by its exit code."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from eth_cli.errors import EthError

_WORDS = {signal.SIGINT: "Ctrl-C"}


class RunStoppedError(EthError):
    """A signal stopped a run (exit code: 128 and the number of the signal, as in a shell)."""

    def __init__(self, message: str, *, by: signal.Signals) -> None:
        self.exit_code = 128 + by
        super().__init__(f"{words(by)}: {message}")


class Interrupts:
    """What has been asked for so far."""

    def __init__(self) -> None:
        self._signals: list[signal.Signals] = []

    @property
    def count(self) -> int:
        """How many signals have come."""
        return len(self._signals)

    @property
    def first(self) -> signal.Signals | None:
        """The first of them."""
        return self._signals[0] if self._signals else None

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal has come; a handler for `signal.signal`."""
        self._signals.append(signal.Signals(number))


def words(number: signal.Signals) -> str:
    """A signal for people."""
    return _WORDS.get(number, number.name)


@contextlib.contextmanager
def counted() -> Iterator[Interrupts]:
    """Count Ctrl-C, SIGTERM and SIGHUP instead of dying of them; outside the main thread, none.

    A SIGHUP that is ignored, as under nohup, stays so.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts.note) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
