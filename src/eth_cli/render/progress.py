"""How far long work has come: a bar on a terminal, one plain line elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eth_cli.render.console import console, print_note

Callback = Callable[[int, int, str], None]
"""Called with (done, total, what is worked on)."""


@contextmanager
def progress(title: str) -> Iterator[Callback]:
    """Show the progress of the work inside the ``with``; yields the function to report it to."""
    started = time.monotonic()
    if sys.stderr.isatty():
        yield from _bar(title)
    else:
        yield _line_printer(title)
    print_note(f"{title}: done in {time.monotonic() - started:.1f} s")


def _line_printer(title: str) -> Callback:
    is_announced = False

    def report(done: int, total: int, what: str) -> None:
        nonlocal is_announced
        if not is_announced:  # Not before: the work may end with an error before it begins.
            print_note(f"{title}: {total} parts ...")
            is_announced = True

    return report


def _bar(title: str) -> Iterator[Callback]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )
