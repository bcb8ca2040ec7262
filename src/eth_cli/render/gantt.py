"""A step as a chart of characters: one row a rank, time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from eth_cli.events import Span, by_rank
from eth_cli.units import format_seconds

IDLE = "·"
SIGNS = {
    "F": ("F", "cyan"),
    "B": ("B", "blue"),
    "SYNC": ("s", "yellow"),
    "OPTIMIZER": ("o", "magenta"),
}
"""Sign and colour by the name of a span."""
COMPUTE = ("F", "B")
LEGEND = "F forward   B backward   s gradient sync   o optimizer   · idle"

MIN_COLUMNS = 20


def gantt(spans: Sequence[Span], labels: Mapping[int, str], *, width: int) -> Group:
    """The chart of one step.

    A column shows what its rank does for most of the column's time; computing wins over a sync
    that runs beside it. Spans of other names are left out.
    """
    drawn = [s for s in spans if s.name in SIGNS and s.stop_s > s.start_s]
    if not drawn:
        return Group(Text("nothing to draw"))
    start = min(s.start_s for s in drawn)
    length = max(s.stop_s for s in drawn) - start
    margin = max(len(label) for label in labels.values())
    columns = max(MIN_COLUMNS, width - margin - 1)
    rows = []
    of_rank = by_rank(drawn)
    for rank in sorted(labels):
        own = of_rank.get(rank, [])
        row = Text(f"{labels[rank]:<{margin}} ", no_wrap=True, overflow="crop")
        for name in _row(own, start, length, columns):
            row.append(*SIGNS.get(name, (IDLE, "dim")))
        rows.append(row)
    scale = f"{' ' * margin} 0{format_seconds(length):>{columns - 1}}"
    return Group(*rows, Text(scale), Text(f"{' ' * margin} {LEGEND}", style="dim"))


def _row(spans: Sequence[Span], start_s: float, length_s: float, columns: int) -> list[str]:
    """The name that each column shows; empty where the rank is idle for most of it."""
    busy: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first = (span.start_s - start_s) / length_s * columns
        stop = (span.stop_s - start_s) / length_s * columns
        for column in range(int(first), min(columns, int(stop) + 1)):
            part = min(stop, column + 1) - max(first, column)
            if part > 0:
                busy[column][span.name] = busy[column].get(span.name, 0.0) + part
    return [_winner(column) for column in busy]


def _winner(parts: Mapping[str, float]) -> str:
    computing = {name: part for name, part in parts.items() if name in COMPUTE}
    others = {name: part for name, part in parts.items() if name not in COMPUTE}
    for group in (computing, others):
        if sum(group.values()) >= 0.5:
            return max(group, key=lambda name: group[name])
    return ""
