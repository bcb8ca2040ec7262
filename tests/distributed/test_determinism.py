"""The same plan twice gives the same bits; another plan gives the same curve."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from distributed.conftest import RunPlan
from distributed.training import (
    RandomTokens,
    make_pipeline,
    make_plan,
    make_spec,
    merged,
)

from eth_cli.events import Span, read_events
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.schedule import pipeline_order

pytestmark = pytest.mark.distributed

PLAN_A = make_plan([make_pipeline([1, 3], share=(4, 1)), make_pipeline([2], share=(2, 2))])
PLAN_B = make_plan([make_pipeline([2, 3, 4], share=(2, 3)), make_pipeline([], share=(2, 1))])


def test_same_plan_twice_is_bit_identical(run_plan: RunPlan, tmp_path: Path) -> None:
    options = RunOptions(steps=10)
    first, second = (
        run_plan(PLAN_A, make_spec(), options, RandomTokens(30), root=tmp_path / name)
        for name in ("first", "second")
    )
    for a, b in zip(first, second, strict=True):
        assert [m.loss for m in a.metrics] == [m.loss for m in b.metrics]
        assert [m.grad_norm for m in a.metrics] == [m.grad_norm for m in b.metrics]
        assert a.weights.keys() == b.weights.keys()
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        assert all(torch.equal(a.moments[name], b.moments[name]) for name in a.moments)


def test_two_plans_give_the_same_loss_curve(run_plan: RunPlan, tmp_path: Path) -> None:
    options = RunOptions(steps=50, learning_rate=3e-3, warmup_steps=5)
    curves = []
    for name, plan in (("a", PLAN_A), ("b", PLAN_B)):
        results = run_plan(plan, make_spec(), options, RandomTokens(24), root=tmp_path / name)
        merged(results, "weights")  # copies are bit-equal after 50 steps
        assert len({tuple(m.loss for m in r.metrics) for r in results}) == 1
        curves.append([m.loss for m in results[0].metrics])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.05  # it learns


def test_executed_order_is_the_schedule(run_plan: RunPlan, tmp_path: Path) -> None:
    plan = make_plan(
        [
            make_pipeline([1, 2], share=(5, 1)),
            make_pipeline([3], share=(1, 1)),
            make_pipeline([], share=(2, 1)),
        ]
    )
    results = run_plan(plan, make_spec(), RunOptions(steps=2), RandomTokens(30))
    for place, result in zip(plan.ranks, results, strict=True):
        pipeline = plan.pipelines[place.pipeline]
        order = pipeline_order(len(pipeline.stages), pipeline.micro_batches)
        assert tuple(result.executed) == order[place.stage]
        spans = [
            e
            for e in read_events(RunFolder(tmp_path).events_of(place.rank))
            if isinstance(e, Span) and e.step == 2 and e.name in ("F", "B")
        ]
        assert [(span.name, span.micro_batch) for span in spans] == [
            (a.op.value, a.micro_batch) for a in order[place.stage] if a.op.is_compute
        ]
        assert {(s.rank, s.pipeline, s.stage) for s in spans} == {
            (place.rank, place.pipeline, place.stage)
        }
        assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(spans))
