"""Curves over the steps of a run: loss, gradient norm, learning rate, tokens a second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eth_cli.render.html import svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 10.0, 30.0
MAX_POINTS = 600
"""Points of a curve; of more, the least and the largest of each piece are kept."""
_SMOOTH_FROM = 40
"""Steps from which a smoothed curve is drawn over the bare one."""

Point = tuple[int, float]
"""A step and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What a chart shows."""

    name: str
    points: Sequence[Point]
    text: Callable[[float], str]
    """Writes a value."""
    from_zero: bool = False
    expected: float | None = None
    """A value to compare with, drawn as a dashed line."""
    is_smoothed: bool = False


def chart(curve: Curve, *, width: float, height: float) -> str:
    """A curve with its axes; empty words where no value is finite."""
    points = [point for point in curve.points if math.isfinite(point[1])]
    if not points:
        return '<p class="empty">no finite value was logged</p>'
    shown = thinned(points)
    values = [value for _, value in shown]
    if curve.expected is not None:
        values.append(curve.expected)
    low, high = svg.range_of(values, from_zero=curve.from_zero)
    first, last = shown[0][0], shown[-1][0]
    across = svg.Scale(first, last if last > first else first + 1, _LEFT, width - _RIGHT)
    up = svg.Scale(low, high, height - _BOTTOM, _TOP)
    parts = _axes(curve, across, up, width=width, height=height)
    if curve.expected is not None:
        y = up(curve.expected)
        parts.append(svg.line(_LEFT, y, width - _RIGHT, y, "expected"))
    is_smoothed = curve.is_smoothed and len(points) >= _SMOOTH_FROM
    parts.append(_line(shown, across, up, "curve bare" if is_smoothed else "curve"))
    if is_smoothed:
        parts.append(_line(thinned(smoothed(points)), across, up, "curve"))
    if len(shown) == 1:
        parts.append(
            svg.element("circle", cx=across(first), cy=up(shown[0][1]), r=3.0, class_="dot")
        )
    parts += _hits(curve, shown, across, height)
    return svg.drawing(width, height, f"{curve.name} by step", *parts)


def _axes(
    curve: Curve, across: svg.Scale, up: svg.Scale, *, width: float, height: float
) -> list[str]:
    parts = []
    for value in svg.ticks(up.low, up.high, 4 if height < 200 else 6):
        y = up(value)
        parts.append(svg.line(_LEFT, y, width - _RIGHT, y, "grid"))
        parts.append(svg.label(_LEFT - 8, y + 4, curve.text(value), class_="tick", anchor="end"))
    count = 5 if width < 500 else 10
    for value in svg.ticks(across.low, across.high, count):
        if value == round(value):
            parts.append(
                svg.label(
                    across(value), height - 10, f"{value:,.0f}", class_="tick", anchor="middle"
                )
            )
    return parts


def _line(points: Sequence[Point], across: svg.Scale, up: svg.Scale, class_: str) -> str:
    coordinates = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return svg.element("polyline", points=coordinates, class_=class_)


def _hits(curve: Curve, points: Sequence[Point], across: svg.Scale, height: float) -> list[str]:
    """Invisible strips, one a point, that tell its value."""
    edges = [across(points[0][0])]
    edges += [(across(a[0]) + across(b[0])) / 2 for a, b in itertools.pairwise(points)]
    edges.append(across(points[-1][0]))
    return [
        svg.box(
            left,
            _TOP,
            max(0.5, right - left),
            height - _TOP - _BOTTOM,
            "hit",
            svg.title(f"step {step}: {curve.name} {curve.text(value)}"),
        )
        for (step, value), left, right in zip(points, edges[:-1], edges[1:], strict=True)
    ]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about `MAX_POINTS` of the points; peaks and dips stay, and so do both ends."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: set[Point] = {points[0], points[-1]}
    for start in range(0, len(points), size):
        piece = points[start : start + size]
        kept.add(min(piece, key=lambda point: point[1]))
        kept.add(max(piece, key=lambda point: point[1]))
    return sorted(kept)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Exponential moving mean over about a thirtieth of the points, without a start from zero."""
    keep = 1 - 1 / max(2.0, len(points) / 30)
    mean, weight, found = 0.0, 0.0, []
    for step, value in points:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        found.append((step, mean / weight))
    return found
