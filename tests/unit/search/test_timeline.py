"""The fast pipeline run against every step run, and its order against the executed lists."""

import random

import pytest

from eth_cli.schedule import pipeline_order
from eth_cli.search.timeline import PipelineTimes, compute_steps, run_pipeline, trace_pipeline


def random_times(rng: random.Random, num_stages: int, *, whole: bool) -> PipelineTimes:
    def draw(count: int, most: float) -> tuple[float, ...]:
        return tuple(
            float(rng.randint(0, 4)) if whole else rng.uniform(0, most) for _ in range(count)
        )

    return PipelineTimes(
        draw(num_stages, 1.0),
        draw(num_stages, 2.0),
        draw(num_stages - 1, 1.5),
        draw(num_stages - 1, 1.5),
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 8, 9, 20])
def test_compute_steps_are_the_executed_lists(num_stages: int, micro_batches: int) -> None:
    steps = compute_steps(num_stages, micro_batches)
    for stage, actions in enumerate(pipeline_order(num_stages, micro_batches)):
        executed = [(str(a.op) == "F", a.micro_batch) for a in actions if a.op.is_compute]
        assert [(s.is_forward, s.micro_batch) for s in steps if s.stage == stage] == executed
    done = set()
    for step in steps:
        source = step.stage + (-1 if step.is_forward else 1)
        if 0 <= source < num_stages:
            assert (source, step.is_forward, step.micro_batch) in done
        done.add(tuple(step))


@pytest.mark.parametrize("whole", [True, False])
def test_skipping_periods_changes_nothing(whole: bool) -> None:
    rng = random.Random(5)
    for _ in range(150):
        num_stages = rng.randint(1, 8)
        times = random_times(rng, num_stages, whole=whole)
        micro_batches = rng.choice([1, 2, 3, 5, 8, 13, 40, 101, 400])
        fast, traced = run_pipeline(times, micro_batches), trace_pipeline(times, micro_batches)
        assert fast.stage_end_s == pytest.approx(traced.stage_end_s, rel=1e-12, abs=0)
        assert fast.end_s == pytest.approx(traced.end_s, rel=1e-12, abs=0)
        assert len(traced.step_starts_s) == 2 * num_stages * micro_batches


def test_a_pace_that_settles_late_is_waited_for() -> None:
    # The slower last stage catches up with the first by 1e-3 a micro-batch: no early repetition.
    times = PipelineTimes((1.0, 0.5, 1.0), (1.0, 0.5, 1.001), (0.1, 0.1), (0.1, 0.1))
    for micro_batches in (100, 3000):
        traced = trace_pipeline(times, micro_batches)
        fast = run_pipeline(times, micro_batches)
        assert fast.stage_end_s == pytest.approx(traced.stage_end_s, rel=1e-12, abs=0)
