"""The look that all tables share, and words for lists of things."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

NOTE_WIDTH = 24
"""Columns that a long note gets at least, before other columns are dropped for it."""


def titled(title: str, table: Table) -> Group:
    """A table under its title. Rich's own titles are wrapped to the width of their table."""
    return Group(Text(title, style="bold"), table)


class FittingTable(Table):
    """A table that never cuts a word: where it is too wide, it does without some columns.

    Where that is not enough either, each row becomes lines of ``name value`` with all it has.
    """

    droppable: tuple[str, ...] = ()
    """Names of columns that can be missed, those that are missed least first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for num_dropped in range(len(self.droppable) + 1):
            table = self._without(self.droppable[:num_dropped])
            if table._needed_width(console, options) <= options.max_width:
                yield from Table.__rich_console__(table, console, options)
                return
        yield from self._records(options.max_width)

    def _without(self, names: Sequence[str]) -> FittingTable:
        table = copy.copy(self)
        kept = [column for column in self.columns if column.header not in names]
        table.columns = [replace(column, _index=i) for i, column in enumerate(kept)]
        return table

    def _needed_width(self, console: Console, options: ConsoleOptions) -> int:
        """Columns of the terminal with which no cell breaks but the long ones of notes."""
        narrow = copy.copy(self)
        narrow.columns = [
            c if c.no_wrap else replace(c, max_width=NOTE_WIDTH) for c in self.columns
        ]
        unlimited = options.update(width=10_000)
        return Table.__rich_measure__(narrow, console, unlimited).maximum

    def _records(self, width: int) -> RenderResult:
        names = [str(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            said = [
                f"{name} {cell}".strip() for name, cell in zip(names, cells, strict=True) if cell
            ]
            line = said[0]
            for words in said[1:]:  # A value stays beside its name.
                if cell_len(f"{line}  {words}") > width:
                    yield Text(line, overflow="fold")
                    line = f"  {words}"
                else:
                    line += f"  {words}"
            yield Text(line, overflow="fold")
        yield Text("")


def new_table(
    *,
    left: Sequence[str],
    right: Sequence[str],
    last: Sequence[str] = (),
    droppable: Sequence[str] = (),
) -> FittingTable:
    """A table whose ``left`` and ``last`` columns are texts and ``right`` ones are numbers."""
    table = FittingTable(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.droppable = tuple(droppable)
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
