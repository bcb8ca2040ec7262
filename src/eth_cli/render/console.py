"""Where output goes: results to stdout, everything else for people to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from eth_cli import stdout
from eth_cli.errors import Fault

if TYPE_CHECKING:  # What prints nothing for people need not wait for rich.
    from rich.console import Console, RenderableType

FILE_WIDTH = 110
"""Columns of output that goes to a file or a pipe, unless COLUMNS says otherwise."""

MAX_FAULTS = 20
"""Faults shown of one file; the first ones usually explain the rest."""


def console(stream: TextIO) -> Console:
    """A console on a stream. Made anew for each use, so that a replaced stream is honoured."""
    from rich.console import Console

    is_narrow_default = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(
        file=stream,
        width=FILE_WIDTH if is_narrow_default else None,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=False,
    )


def output_width() -> int:
    """Columns of stdout."""
    return console(sys.stdout).width


def print_result(*parts: RenderableType) -> None:
    """A result for people, to stdout. Raises as `stdout.writing` does."""
    out = console(sys.stdout)
    with stdout.writing():
        for part in parts:
            out.print(part)


def print_json(text: str) -> None:
    """A result for machines, to stdout and as it is. Raises as `stdout.writing` does."""
    stdout.write(text)


def print_note(text: str) -> None:
    """A line for people, to stderr."""
    err = console(sys.stderr)
    err.print(text, overflow="ignore", crop=False, no_wrap=True)


def print_error(message: str, *, hint: str = "") -> None:
    """Why the command failed: one line, to stderr."""
    _print_marked("error", "bold red", message + (f"; {hint}" if hint else ""))


def print_warning(message: str) -> None:
    """What a person should know before trusting the result: one line, to stderr."""
    _print_marked("warning", "bold yellow", message)


def print_faults(faults: Iterable[Fault]) -> None:
    """Everything that is wrong with the input, a line each, to stderr."""
    lines = [str(fault) for fault in faults]
    for line in lines[:MAX_FAULTS]:
        print_error(line)
    if len(lines) > MAX_FAULTS:
        print_error(f"and {len(lines) - MAX_FAULTS} more")


def _print_marked(mark: str, style: str, message: str) -> None:
    err = console(sys.stderr)
    err.print(f"{mark}: ", style=style, end="")
    # One line whatever a message quotes, and never a control character from a file.
    line = " ".join(message.split())
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    err.print(shown, overflow="ignore", crop=False, no_wrap=True)
