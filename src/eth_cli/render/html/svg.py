"""Pieces of SVG as text: elements, scales and axes. Every text and attribute is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

CHARACTER = 6.4
"""Mean width of a character at the size that labels have [px]."""


def element(name: str, *children: str, text: str = "", **attributes: object) -> str:
    """An element; ``class_`` is the attribute of that name, ``_`` stands for ``-``."""
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
    ]
    return f"<{name}{''.join(parts)}>{escape(text)}{''.join(children)}</{name}>"


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def drawing(width: float, height: float, label: str, *children: str) -> str:
    """A whole SVG that takes the width it is given; ``label`` is read to who cannot see it."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_plain(float(width))} {_plain(float(height))}",
        role="img",
        aria_label=label,
    )


def title(text: str) -> str:
    """What is shown while a pointer rests on the element that holds it."""
    return element("title", text=text)


def label(x: float, y: float, text: str, *, class_: str = "label", anchor: str = "start") -> str:
    """A text; ``anchor`` is the end of it that stands at ``x``."""
    return element("text", text=text, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def box(
    x: float, y: float, width: float, height: float, class_: str, *children: str, rx: float = 0.0
) -> str:
    """A rectangle."""
    return element(
        "rect",
        *children,
        x=float(x),
        y=float(y),
        width=float(width),
        height=float(height),
        class_=class_,
        rx=rx,
    )


def fitting(text: str, width: float) -> str:
    """As much of a text as fits, with an ellipsis where something is missing."""
    room = int(width / CHARACTER)
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room >= 3 else ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values onto pixels, linearly."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    factor = next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= count)
    step *= factor
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def range_of(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """Limits that leave some room around values, and are never equal."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room


def time_axis(scale: Scale, top: float, bottom: float, text: Callable[[float], str]) -> list[str]:
    """Grid lines with their texts below."""
    parts = []
    for value in ticks(scale.low, scale.high, 8):
        x = scale(value)
        parts.append(line(x, top, x, bottom, "grid"))
        parts.append(label(x, bottom + 16, text(value), class_="tick", anchor="middle"))
    return parts
