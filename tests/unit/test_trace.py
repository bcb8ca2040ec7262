"""Chrome traces: rows, times and what may not overlap."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from builders import make_cluster, make_plan, make_profile

from eth_cli.events import Span
from eth_cli.search.simulate import simulate
from eth_cli.trace import write_trace


def read_trace(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    assert data["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = data["traceEvents"]
    return events


def span(name: str, start_s: float, stop_s: float, *, rank: int = 0, **more: Any) -> Span:
    return Span(rank=rank, name=name, start_s=start_s, stop_s=stop_s, **more)


def test_a_span_becomes_an_event_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one = span("F", 0.25, 0.5000000004, rank=2, step=4, micro_batch=3, blocks=(1, 6))
    write_trace(path, make_plan(), measured=[one])
    (event,) = [e for e in read_trace(path) if e["ph"] == "X"]
    assert event == {
        "ph": "X",
        "pid": 1,
        "tid": 2000,
        "name": "F3",
        "cat": "F",
        "ts": 250000.0,
        "dur": 250000.0,
        "args": {"step": 4, "blocks": [1, 6]},
    }


def test_rows_are_named_after_ranks_and_their_places(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plan = make_plan()
    write_trace(path, plan, predicted=[span("F", 0, 1)], measured=[span("F", 0, 2)])
    events = read_trace(path)
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        0: "predicted",
        1: "measured",
    }
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert names == [
        f"rank {p.rank} {p.device} pipeline {p.pipeline} stage {p.stage}" for p in plan.ranks
    ]


def test_a_side_without_spans_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, make_plan(), predicted=[span("F", 0, 1)])
    assert {e["pid"] for e in read_trace(path)} == {0}
    write_trace(path, make_plan())
    assert read_trace(path) == []


def test_syncs_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [
        span("B", 0, 9),
        span("SYNC", 1, 4),
        span("SYNC", 2, 3),
        span("SYNC", 3, 5),
        span("SYNC", 4, 6),
    ]
    write_trace(path, make_plan(), measured=spans)
    rows = [(e["ts"] / 1e6, e["tid"]) for e in read_trace(path) if e["ph"] == "X"]
    assert rows == [(0, 0), (1, 1), (4, 1), (2, 2), (3, 2)]


def test_a_simulated_plan_has_no_overlaps_in_any_row_and_stable_bytes(tmp_path: Path) -> None:
    plan = make_plan()
    spans = simulate(plan, make_profile(), make_cluster()).spans
    write_trace(tmp_path / "one.json", plan, predicted=spans)
    write_trace(tmp_path / "two.json", plan, predicted=spans)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    drawn = [e for e in read_trace(tmp_path / "one.json") if e["ph"] == "X"]
    assert len(drawn) == len(spans)
    for event in drawn:
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for (_, stop), (start, _) in itertools.pairwise(sorted(row)):
            assert start >= stop - 0.01  # rounded to nanoseconds
