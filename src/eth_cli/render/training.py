"""A training run while it goes on and once it is over. Progress is on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.text import Text

from eth_cli.launch.progress import Progress as StepProgress
from eth_cli.launch.run import RunResult
from eth_cli.launch.utilisation import Utilisation
from eth_cli.plan import Plan
from eth_cli.render.console import console, print_note, print_warning
from eth_cli.units import format_bytes, format_seconds

LINE_EVERY_S = 10.0
"""Time between two lines of progress where there is no terminal [s]."""


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[StepProgress], None]]:
    """Show how a run gets on; yields the function to report each step to.

    A live bar on a terminal; elsewhere a plain line after the first and the last step and every
    ten seconds.
    """
    if sys.stderr.isatty():
        yield from _bar(steps)
    else:
        yield _line_printer()


def _bar(steps: int) -> Iterator[Callable[[StepProgress], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("starting workers", total=steps)
        yield lambda now: bar.update(task, completed=now.step, description=describe(now))


def _line_printer() -> Callable[[StepProgress], None]:
    last_s: float | None = None

    def show(now: StepProgress) -> None:
        nonlocal last_s
        time_s = time.monotonic()
        if last_s is None or now.step == now.steps or time_s - last_s >= LINE_EVERY_S:
            print_note(f"step {now.step}/{now.steps}  {describe(now)}")
            last_s = time_s

    return show


def show_notice(text: str) -> None:
    """A line that a person should read, also above a live bar."""
    # A terminal that was closed takes no more lines, and must not end the run that goes on to save.
    with suppress(OSError):
        print_warning(text)


def describe(now: StepProgress) -> str:
    """The figures that people watch, on one line."""
    loss = "skipped, not finite" if now.loss is None else f"loss {now.loss:.4f}"
    words = [
        loss,
        f"{format_seconds(now.step_time_s)}/step",
        f"{now.tokens_per_s:,.0f} tokens/s",
        *_utilisation(now.utilisation),
        f"{_time_left(now.eta_s)} left",
    ]
    return "  ".join(words)


def _utilisation(used: Utilisation) -> Iterator[str]:
    if used.mfu is not None:
        yield f"MFU {100 * used.mfu:.1f} %"
    elif used.busy_share is not None:
        yield f"busy {100 * used.busy_share:.0f} %"
    if used.memory_bytes is not None:
        share = "" if used.memory_share is None else f" ({100 * used.memory_share:.0f} %)"
        yield f"memory {format_bytes(used.memory_bytes)}{share}"


def _time_left(seconds: float) -> str:
    """``45 s``, ``12 min 5 s``, ``3 h 20 min`` or ``2 d 4 h``."""
    whole = round(seconds)
    for size, name, smaller, smaller_name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {smaller_name}"
    return f"{whole} s"


def run_summary(plan: Plan, result: RunResult) -> Text:
    """How a run ended, next to what was predicted."""
    trained = result.steps - result.first_step
    parts = [
        f"{'stopped after' if result.stopped else 'trained'} {trained} steps "
        f"in {format_seconds(result.wall_s)}"
    ]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4f}")
    if result.median_step_time_s is not None:
        measured = f"{format_seconds(result.median_step_time_s)} a step"
        if plan.predicted is not None:
            measured += f" (predicted {format_seconds(plan.predicted.step_time_s)})"
        parts.append(measured)
    if result.tokens_per_s is not None:
        parts.append(f"{result.tokens_per_s:,.0f} tokens/s")
    return Text(", ".join(parts))
