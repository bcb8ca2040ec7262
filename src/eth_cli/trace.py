"""Spans as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Predicted and measured spans become two processes of one file, each with a row a rank. What runs
beside computation (gradient sync) gets rows of its own, as overlapping spans cannot share one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eth_cli import serde
from eth_cli.events import Span, by_rank
from eth_cli.plan import Plan

BESIDE_COMPUTE = frozenset({"SYNC"})
"""Names of spans that run beside what their rank computes."""
_ROWS_A_RANK = 1000
"""Row ids set aside for each rank; the first is for what the rank itself does."""


def write_trace(
    path: str | Path, plan: Plan, *, predicted: Sequence[Span] = (), measured: Sequence[Span] = ()
) -> None:
    """Write spans of a plan's ranks; the same spans give the same bytes.

    Predicted and measured times are compared by eye, so both should begin at 0.

    Raises:
        ConfigError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for process, (name, spans) in enumerate((("predicted", predicted), ("measured", measured))):
        if spans:
            events += _process_events(process, name, spans, plan)
    # An event a line, so that two traces can be compared as text.
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    serde.write_text(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')


def _process_events(
    process: int, name: str, spans: Sequence[Span], plan: Plan
) -> Iterable[dict[str, Any]]:
    yield _label(process, 0, "process_name", name=name)
    yield _label(process, 0, "process_sort_index", sort_index=process)
    of_rank = by_rank(spans)
    for place in plan.ranks:
        own = of_rank.get(place.rank, [])
        row = place.rank * _ROWS_A_RANK
        where = f"{place.device} pipeline {place.pipeline} stage {place.stage}"
        yield from _row(process, row, f"rank {place.rank} {where}")
        yield from (_event(process, row, s) for s in own if s.name not in BESIDE_COMPUTE)
        beside = [s for s in own if s.name in BESIDE_COMPUTE]
        for lane, lane_spans in enumerate(_lanes(beside), start=1):
            yield from _row(process, row + lane, f"rank {place.rank} beside")
            yield from (_event(process, row + lane, span) for span in lane_spans)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as possible, so that none of a row overlap: first fit by start."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.stop_s)):
        free = next((lane for lane in lanes if lane[-1].stop_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _row(process: int, row: int, name: str) -> Iterable[dict[str, Any]]:
    yield _label(process, row, "thread_name", name=name)
    yield _label(process, row, "thread_sort_index", sort_index=row)


def _label(process: int, row: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": args}


def _event(process: int, row: int, span: Span) -> dict[str, Any]:
    name = span.name if span.micro_batch is None else f"{span.name}{span.micro_batch}"
    args: dict[str, Any] = {}
    if span.step is not None:
        args["step"] = span.step
    if span.blocks is not None:
        args["blocks"] = list(span.blocks)
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "cat": span.name,
        # Microseconds, to the nanosecond.
        "ts": round(span.start_s * 1e6, 3),
        "dur": round(span.duration_s * 1e6, 3),
        "args": args,
    }
