"""metrics.jsonl read while it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eth_cli.launch.progress import MetricsTail, Speedometer, StepRecord, parse_step


def line(step: int, **changes: object) -> str:
    data = {"step": step, "loss": 5.5 - step / 10, "tokens": 400, "step_time_s": 0.25, "lr": 0.1}
    return json.dumps(data | changes) + "\n"


def record(step: int, *, step_time_s: float, tokens: int = 400) -> StepRecord:
    return StepRecord(step=step, loss=5.0, tokens=tokens, step_time_s=step_time_s)


def test_each_line_is_given_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    whole = line(2)
    path.write_text(line(1) + whole[:9])
    assert [r.step for r in tail.read()] == [1]
    assert tail.read() == []
    path.write_text(line(1) + whole + line(3))
    assert [r.step for r in tail.read()] == [2, 3]


def test_steps_before_a_resume_are_not_given_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    tail = MetricsTail(path, after_step=2)
    assert [r.step for r in tail.read()] == [3]


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    tail = MetricsTail(path)
    tail.read()
    path.write_text(line(1))
    assert tail.read() == []
    path.write_text(line(1) + line(2) + line(3))
    assert [r.step for r in tail.read()] == [3]


def test_a_skipped_step_has_no_loss() -> None:
    skipped = json.loads(line(4))
    del skipped["loss"]
    parsed = parse_step(json.dumps(skipped | {"skipped": True}))
    assert parsed is not None
    assert parsed.loss is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"step": 1}', '{"step": "a"}', "null"])
def test_what_is_no_step_is_left_out(text: str) -> None:
    assert parse_step(text) is None


def test_the_first_step_does_not_count_for_the_speed() -> None:
    speed = Speedometer(steps=10)
    first = speed.progress(record(1, step_time_s=3.0))
    assert first.tokens_per_s == pytest.approx(400 / 3)
    assert first.eta_s == pytest.approx(9 * 3.0)
    second = speed.progress(record(2, step_time_s=0.5, tokens=300))
    assert second.tokens_per_s == pytest.approx(600)
    assert second.eta_s == pytest.approx(8 * 0.5)
    assert (second.step, second.steps, second.step_time_s) == (2, 10, 0.5)


def test_after_a_resume_every_step_counts() -> None:
    speed = Speedometer(steps=24)
    speed.progress(record(21, step_time_s=0.5))
    assert speed.progress(record(22, step_time_s=0.3)).eta_s == pytest.approx(2 * 0.4)
