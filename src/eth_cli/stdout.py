"""Stdout, where results go: its reader may leave early, and the file behind it may be full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eth_cli.errors import EthError

DESCRIPTOR = 1


class StdoutFullError(EthError):
    """Stdout takes no more (exit code 2)."""

    exit_code = 2


class ReaderGoneError(EthError):
    """Nobody reads stdout any more, as in ``eth plan --json | head``: no reason to say a word."""

    exit_code = 141  # 128 + SIGPIPE, as of any program in a pipe


@contextmanager
def writing() -> Iterator[None]:
    """What is written to stdout inside has arrived at the end.

    Raises:
        StdoutFullError, ReaderGoneError: it has not. Stdout then leads nowhere, because Python
            flushes it once more at exit, and that must not fail again.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop()
        raise ReaderGoneError("nobody reads stdout") from None
    except OSError as error:
        _drop()
        raise StdoutFullError(f"stdout: cannot be written: {error.strerror}") from None


def write(text: str) -> None:
    """Write text as it is. Raises as `writing` does."""
    with writing():
        sys.stdout.write(text)


def flush() -> None:
    """Send off what was printed so far. Raises as `writing` does."""
    with writing():
        pass


def is_stdout(path: str | Path) -> bool:
    """Whether a path is where this process's stdout goes, as ``/dev/stdout`` always is."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(DESCRIPTOR))
    except OSError:
        return False


def _drop() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, DESCRIPTOR)
    os.close(nowhere)
