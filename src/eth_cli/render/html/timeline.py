"""The measured over the predicted step, a row a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from eth_cli.events import Span, by_rank
from eth_cli.plan import Plan
from eth_cli.render.html import svg
from eth_cli.units import format_seconds

WIDTH = 1080.0
_LEFT, _RIGHT, _BOTTOM = 128.0, 12.0, 28.0
_MEASURED, _PREDICTED, _SYNC, _GAP = 18.0, 9.0, 4.0, 10.0
"""Heights of what a row is made of [px]."""
MAX_RANKS = 128
"""Rows drawn; a page of thousands would be read by nobody."""
_THIN = 0.5
"""Spans of one kind that are narrower and next to each other are drawn as one [px]."""

CLASSES = {"F": "forward", "B": "backward", "SYNC": "sync", "OPTIMIZER": "optimizer"}
WORDS = {
    "F": "forward",
    "B": "backward",
    "SYNC": "gradient sync",
    "OPTIMIZER": "optimizer",
}
"""What is drawn, by the name of the span."""


def timeline(plan: Plan, measured: Sequence[Span], predicted: Sequence[Span]) -> str:
    """The typical measured step; under each rank's row, smaller, the predicted one."""
    measured, predicted = _drawn(measured), _drawn(predicted)
    places = plan.ranks[:MAX_RANKS]
    end_s = max(span.stop_s for span in (*measured, *predicted))
    scale = svg.Scale(0.0, end_s, _LEFT, WIDTH - _RIGHT)
    row = _MEASURED + _SYNC + _GAP + (_PREDICTED + _SYNC if predicted else 0.0)
    bottom = 4 + row * len(places)
    parts = svg.time_axis(scale, 0.0, bottom, format_seconds)
    own, expected = by_rank(measured), by_rank(predicted)
    for index, place in enumerate(places):
        y = 4 + index * row
        where = f"p{place.pipeline} s{place.stage}"
        name = svg.fitting(place.device, _LEFT - 60)
        parts.append(svg.label(0, y + 13, name, class_="label strong"))
        parts.append(svg.label(_LEFT - 12, y + 13, where, class_="tick", anchor="end"))
        who = f"rank {place.rank}, {place.device}, pipeline {place.pipeline} stage {place.stage}"
        parts += _row(own.get(place.rank, []), scale, y, _MEASURED, f"{who}: measured")
        if predicted:
            below = y + _MEASURED + _SYNC + 1
            spans = expected.get(place.rank, [])
            parts += _row(spans, scale, below, _PREDICTED, f"{who}: predicted", extra=" predicted")
    return svg.drawing(WIDTH, bottom + _BOTTOM, "timeline of a step, a row a rank", *parts)


def _drawn(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.name in CLASSES and span.stop_s > span.start_s]


def _row(
    spans: Sequence[Span], scale: svg.Scale, y: float, height: float, who: str, *, extra: str = ""
) -> Iterable[str]:
    for span, count in _joined(spans, scale):
        beside = span.name == "SYNC"
        x = scale(span.start_s)
        yield svg.box(
            x,
            y + height if beside else y,
            max(0.3, scale(span.stop_s) - x),
            _SYNC if beside else height,
            f"span {CLASSES[span.name]}{extra}",
            svg.title(f"{who} {_words(span, count)}"),
        )


def _words(span: Span, count: int) -> str:
    what = WORDS[span.name]
    if count > 1:
        what = f"{count} x {what}"
    elif span.micro_batch is not None:
        what += f" of micro-batch {span.micro_batch}"
    elif span.blocks is not None:
        what += f" of blocks [{span.blocks[0]}, {span.blocks[1]})"
    return f"{what}, {format_seconds(span.duration_s)}, from {format_seconds(span.start_s)}"


def _joined(spans: Sequence[Span], scale: svg.Scale) -> Iterable[tuple[Span, int]]:
    """The spans with thin ones that follow each other put together, and of how many they are."""
    thin_s = _THIN / (scale.stop - scale.start) * (scale.high - scale.low)
    current: dict[str, tuple[Span, int]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        before, count = current.get(span.name, (None, 0))
        if (
            before is not None
            and span.duration_s < thin_s
            and span.start_s - before.stop_s < thin_s
            and before.duration_s < 4 * thin_s
        ):
            stop_s = max(before.stop_s, span.stop_s)
            current[span.name] = replace(before, stop_s=stop_s), count + 1
            continue
        if before is not None:
            yield before, count
        current[span.name] = span, 1
    yield from current.values()
