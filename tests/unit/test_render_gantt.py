"""The Gantt chart: what each column shows."""

from __future__ import annotations

import io

from rich.console import Console

from eth_cli.events import Span
from eth_cli.render.gantt import gantt


def draw(spans: list[Span], *, width: int = 26) -> list[str]:
    """The chart's lines; labels take 5 columns and a blank."""
    out = io.StringIO()
    labels = {0: "0 a:0", 1: "1 b:0"}
    Console(file=out, width=80, color_system=None).print(gantt(spans, labels, width=width))
    return out.getvalue().splitlines()


def span(rank: int, name: str, start_s: float, stop_s: float) -> Span:
    """A span with only what the chart reads."""
    return Span(rank=rank, name=name, start_s=start_s, stop_s=stop_s)


def test_a_column_is_a_twentieth_of_the_step() -> None:
    lines = draw(
        [
            span(0, "F", 100.0, 105.0),
            span(0, "B", 110.0, 120.0),
            span(1, "F", 105.0, 107.0),
            span(1, "OPTIMIZER", 118.0, 120.0),
        ]
    )
    assert lines[0] == "0 a:0 FFFFF·····BBBBBBBBBB"
    assert lines[1] == "1 b:0 ·····FF···········oo"
    assert lines[2].split() == ["0", "20.0", "s"]


def test_computing_wins_over_a_sync_beside_it_and_other_names_are_left_out() -> None:
    lines = draw(
        [
            span(0, "B", 0.0, 10.0),
            span(0, "SYNC", 5.0, 20.0),
            span(0, "STEP", 0.0, 40.0),
        ]
    )
    assert lines[0] == "0 a:0 BBBBBBBBBBssssssssss"
    assert lines[1] == "1 b:0 " + "·" * 20


def test_nothing_to_draw() -> None:
    assert draw([]) == ["nothing to draw"]
