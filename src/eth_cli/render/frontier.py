"""Step time against devices: as a table, as a plot of characters, and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eth_cli.render.money import cost_data, money, tokens_per_dollar
from eth_cli.render.tables import new_table, titled
from eth_cli.search.cheapest import Cheapest
from eth_cli.search.frontier import Frontier, Point
from eth_cli.units import format_seconds

ON, OFF = "*", "·"
"""Signs of a point on the frontier and of one that is not."""
ROWS = 12
"""Height of the plot of characters."""


def frontier_view(frontier: Frontier, *, width: int) -> Iterator[RenderableType]:
    """The table and the plot."""
    yield titled(f"step time against devices, {frontier.num_searches} searches", _table(frontier))
    yield Text(f"{ON} no plan found is as fast with fewer devices")
    yield _plot(_dots(frontier), width=width)


def _table(frontier: Frontier) -> Table:
    is_priced = all(point.cost is not None for point in frontier.points)
    priced = ("an hour", "tokens/$") if is_priced else ()
    table = new_table(
        left=("",),
        right=("devices", "step", "tokens/s", "gap", *priced),
        last=("of types",),
        droppable=("gap", "tokens/s"),
    )
    for point in frontier.points:
        simulation, cost = point.report.simulation, point.cost
        table.add_row(
            ON if frontier.is_fastest(point) else "",
            str(point.num_devices),
            format_seconds(point.step_time_s),
            f"{simulation.tokens_per_s:,.0f}",
            f"{100 * point.report.gap:.1f} %",
            *((money(cost.per_hour), tokens_per_dollar(cost)) if is_priced and cost else ()),
            of_types(point.used),
        )
    return table


def of_types(counts: Mapping[str, int]) -> str:
    """``4 A100-40, 2 T4``."""
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def cheapest_line(found: Cheapest) -> Text:
    """What the cheapest plan saves."""
    cost, other = found.point.cost, found.fastest.cost
    assert cost is not None
    assert other is not None  # every type has a price
    line = f"cheapest of {len(found.frontier.points)} plans of parts of the cluster, not proved: "
    line += f"{money(cost.per_hour)} an hour, {tokens_per_dollar(cost)} tokens per dollar"
    if found.point is not found.fastest:
        line += (
            f"; the fastest takes {format_seconds(found.fastest.step_time_s)} a step at "
            f"{money(other.per_hour)} an hour, {tokens_per_dollar(other)} tokens per dollar"
        )
    return Text(line)


def frontier_data(frontier: Frontier) -> dict[str, Any]:
    """The points as plain JSON data."""
    return {
        "num_searches": frontier.num_searches,
        "points": [
            {
                "num_devices": point.num_devices,
                "devices": dict(point.used),
                "step_time_s": point.step_time_s,
                "tokens_per_s": point.report.simulation.tokens_per_s,
                "bound_s": point.report.bound_s,
                "gap": point.report.gap,
                "cost": cost_data(point.cost),
                "is_fastest_for_its_devices": frontier.is_fastest(point),
                "is_fastest_for_its_price": frontier.is_cheapest(point),
            }
            for point in frontier.points
        ],
    }


# --- Plots ----------------------------------------------------------------------------------------


class Dot(NamedTuple):
    """A point of a plot."""

    x: float
    y: float
    is_on: bool
    """Whether it is on the frontier."""
    label: str


def _dots(frontier: Frontier) -> list[Dot]:
    return [
        Dot(p.num_devices, p.step_time_s, frontier.is_fastest(p), of_types(p.used))
        for p in frontier.points
    ]


def _plot(dots: Sequence[Dot], *, width: int) -> RenderableType:
    """Time upwards from 0, devices to the right from 0."""
    top, right = max(d.y for d in dots), max(d.x for d in dots)
    labels = {0: format_seconds(top), ROWS - 1: "0 s"}
    margin = max(len(label) for label in labels.values())
    columns = max(20, min(width - margin - 2, 72))
    cells = [[" "] * columns for _ in range(ROWS)]
    for dot in sorted(dots, key=lambda d: d.is_on):  # Those on the frontier are drawn over.
        row = round((1 - dot.y / top) * (ROWS - 1))
        cells[row][round(dot.x / right * (columns - 1))] = ON if dot.is_on else OFF
    lines = [
        Text(f"{labels.get(i, ''):>{margin}} |{''.join(row).rstrip()}", no_wrap=True)
        for i, row in enumerate(cells)
    ]
    axis = f"{' ' * margin} +{'-' * columns}"
    scale = f"{' ' * margin}  0{f'{right:g} devices':>{columns - 1}}"
    return Group(*lines, Text(axis, no_wrap=True), Text(scale, no_wrap=True))


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 80, 30, 40, 50
"""Size of a panel and of its margins [px]."""
_TICKS = 4


def frontier_svg(frontier: Frontier, *, title: str) -> str:
    """The plot as an SVG file: against devices and, where all have prices, against price."""
    panels = [_panel(_dots(frontier), "devices", lambda x: f"{x:g}")]
    if all(point.cost is not None for point in frontier.points):
        panels.append(_panel(_priced_dots(frontier.points, frontier), "price an hour", money))
    height = _HEIGHT * len(panels) + _TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate(0,{_TOP + i * _HEIGHT})">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _priced_dots(points: Sequence[Point], frontier: Frontier) -> list[Dot]:
    return [
        Dot(p.cost.per_hour, p.step_time_s, frontier.is_cheapest(p), of_types(p.used))
        for p in points
        if p.cost is not None
    ]


def _panel(dots: Sequence[Dot], x_name: str, x_text: Callable[[float], str]) -> list[str]:
    right, top = max(d.x for d in dots), max(d.y for d in dots)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[str, str]:
        return f"{_LEFT + x / right * wide:.1f}", f"{high - y / top * high:.1f}"

    parts = []
    for i in range(_TICKS + 1):
        x, y = right * i / _TICKS, top * i / _TICKS
        column, row = at(x, y)
        parts += [
            f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{row}" y2="{row}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{row}" text-anchor="end" dy="4">{format_seconds(y)}</text>',
            f'<text x="{column}" y="{high + 18}" text-anchor="middle">{escape(x_text(x))}</text>',
        ]
    parts.append(
        f'<text x="{_LEFT + wide / 2:.1f}" y="{high + 36}" text-anchor="middle">{x_name}</text>'
    )
    on = sorted((d for d in dots if d.is_on), key=lambda d: d.x)
    line = " ".join(",".join(at(d.x, d.y)) for d in on)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    for dot in dots:
        column, row = at(dot.x, dot.y)
        colour = "#1f77b4" if dot.is_on else "#bbb"
        parts.append(
            f'<circle cx="{column}" cy="{row}" r="4" fill="{colour}">'
            f"<title>{escape(dot.label)}: {format_seconds(dot.y)}</title></circle>"
        )
    return parts
