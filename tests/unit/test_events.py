"""Events: one JSON object a line, there and back, and what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from eth_cli.errors import ConfigError
from eth_cli.events import (
    Event,
    Instant,
    Scalar,
    Span,
    from_json,
    read_events,
    to_json,
    write_events,
)

SPAN = Span(
    rank=3,
    name="F",
    start_s=1796152521.25,
    stop_s=1796152521.5,
    step=7,
    pipeline=1,
    stage=2,
    micro_batch=0,
    blocks=(4, 6),
)
EVENTS: tuple[Event, ...] = (
    SPAN,
    Span(rank=0, name="STEP", start_s=0.0, stop_s=2.0),
    Scalar(rank=1, name="peak_memory_bytes", value=1.5e9, step=3),
    Scalar(rank=1, name="missed_paces_count", value=4),
    Instant(rank=2, name="resumed", time_s=12.5, detail='from "step 20"\n'),
)


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    write_events(path, EVENTS[:2])
    write_events(path, EVENTS[2:])
    assert tuple(read_events(path)) == EVENTS
    assert len(path.read_text().splitlines()) == len(EVENTS)


def test_the_written_form_is_short_and_stable() -> None:
    assert to_json(SPAN) == (
        '{"kind":"span","rank":3,"name":"F","start_s":1796152521.25,"stop_s":1796152521.5,'
        '"step":7,"pipeline":1,"stage":2,"micro_batch":0,"blocks":[4,6]}'
    )
    assert SPAN.duration_s == 0.25


def test_a_last_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    for length in range(1, len(to_json(SPAN))):
        path.write_text(to_json(EVENTS[1]) + "\n" + to_json(SPAN)[:length])
        assert tuple(read_events(path)) == EVENTS[1:2]


def test_an_empty_file_holds_no_events(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    path.write_text("")
    assert tuple(read_events(path)) == ()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        '"span"',
        '{"kind":"spam","rank":0}',
        '{"kind":"span","rank":0,"name":"F","start_s":1}',
        '{"kind":"span","rank":0,"name":"F","start_s":1,"stop_s":2,"colour":"red"}',
        '{"kind":"span","rank":0,"name":"F","start_s":"1","stop_s":2}',
        '{"kind":"span","rank":0,"name":"F","start_s":NaN,"stop_s":2}',
        '{"kind":"span","rank":0.5,"name":"F","start_s":1,"stop_s":2}',
        '{"kind":"span","rank":true,"name":"F","start_s":1,"stop_s":2}',
        '{"kind":"span","rank":0,"name":7,"start_s":1,"stop_s":2}',
        '{"kind":"span","rank":0,"name":"F","start_s":1,"stop_s":2,"blocks":[1,2,3]}',
        '{"kind":"span","rank":0,"name":"F","start_s":1,"stop_s":2,"blocks":[1,"2"]}',
        '{"kind":"span","rank":0,"name":"F","start_s":1,"stop_s":2,"blocks":{}}',
    ],
)
def test_what_is_no_event_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(line)
    path = tmp_path / "rank-3.jsonl"
    path.write_text(f"{to_json(SPAN)}\n{line}\n{to_json(SPAN)}\n")
    with pytest.raises(ConfigError) as caught:
        list(read_events(path))
    (fault,) = caught.value.faults
    assert (fault.file, fault.field) == (str(path), "line 2")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot be read"):
        list(read_events(tmp_path / "absent"))
    path = tmp_path / "rank-3.jsonl"
    path.write_bytes(b"\xff\xfe" * 9)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        list(read_events(path))
