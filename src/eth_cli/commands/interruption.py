"""Ctrl-C while a search goes on: the first asks it to end with what it has, the next ends it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from eth_cli.errors import EthError


class InterruptedEarlyError(EthError):
    """Ctrl-C ended a search early; what it had found by then has been written and shown."""

    exit_code = 130


class Interruption:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.is_pressed = False
        self.is_patient = True
        """Whether the first Ctrl-C only asks; else it raises at once, as the second always does."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.is_pressed or not self.is_patient:
            raise KeyboardInterrupt
        self.is_pressed = True

    def is_stopped(self) -> bool:
        """Whether the search should end."""
        return self.is_pressed


@contextlib.contextmanager
def watched() -> Iterator[Interruption]:
    """Note Ctrl-C instead of ending by it; outside the main thread, or where it is ignored, not."""
    interruption = Interruption()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
