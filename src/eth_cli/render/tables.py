"""The look that all tables share, and words for lists of things."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


def titled(title: str, table: Table) -> Group:
    """A table under its title. Rich's own titles are wrapped to the width of their table."""
    return Group(Text(title, style="bold"), table)


def new_table(*, left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()) -> Table:
    """A table whose ``left`` and ``last`` columns are texts and ``right`` ones are numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def join_devices(devices: Sequence[str], *, limit: int = 6) -> str:
    """Device ids shortened: ``a:0, a:1, a:2, b:5`` as ``a:0-2 b:5``; only ``limit`` runs."""
    runs: list[tuple[str, int, int]] = []
    for device in devices:
        node, _, text = device.rpartition(":")
        index = int(text)
        if runs and runs[-1][0] == node and runs[-1][2] + 1 == index:
            runs[-1] = (node, runs[-1][1], index)
        else:
            runs.append((node, index, index))
    words = [
        f"{node}:{first}" if first == last else f"{node}:{first}-{last}"
        for node, first, last in runs
    ]
    left_out = len(words) - limit
    return " ".join(words[:limit]) + (f" and {left_out} more" if left_out > 0 else "")


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` in whole percent."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"
