"""Which times emulated devices keep to, and that they keep to them."""

from __future__ import annotations

import logging
import time

import pytest
from builders import make_cluster, make_pipeline, make_plan

from eth_cli.launch.runtime import pacing
from eth_cli.launch.runtime.pacing import Pacer, StagePace, missing_paces, stage_pace
from eth_cli.plan import PacedBlock, PacedOptimizer, Pacing, Plan

TIMES = {  # device type, block kind: forward [s], backward [s]
    ("fast", "embedding"): (0.001, 0.002),
    ("fast", "transformer"): (0.003, 0.007),
    ("fast", "head"): (0.011, 0.013),
    ("slow", "embedding"): (0.017, 0.019),
    ("slow", "transformer"): (0.023, 0.029),
    ("slow", "head"): (0.031, 0.037),
}


def paced_plan(*, leave_out: tuple[str, str] | None = None, emulated: bool = True) -> Plan:
    blocks = tuple(
        PacedBlock(
            device=device,
            block=block,
            tensor_parallel=1,
            micro_batch_size=1,
            forward_s=forward_s,
            backward_s=backward_s,
        )
        for (device, block), (forward_s, backward_s) in TIMES.items()
        if (device, block) != leave_out
    )
    optimizers = (PacedOptimizer(device="slow", optimizer_s_per_parameter=5e-9),)
    pipeline = make_pipeline(devices=("a:0", "b:0"), cuts=(6,))
    return make_plan(pipelines=[pipeline]).model_copy(
        update={
            "cluster": make_cluster(emulated=emulated),
            "pacing": Pacing(blocks=blocks, optimizers=optimizers),
        }
    )


def test_pace_of_each_stage_follows_its_device_and_blocks() -> None:
    plan = paced_plan()
    assert stage_pace(plan, pipeline=0, stage=0) == StagePace(
        blocks=(0, 6),
        forward_s=(0.001, *[0.003] * 5),
        backward_s=(0.002, *[0.007] * 5),
        optimizer_s_per_parameter=0.0,
    )
    assert stage_pace(plan, pipeline=0, stage=1) == StagePace(
        blocks=(6, 8),
        forward_s=(0.023, 0.031),
        backward_s=(0.029, 0.037),
        optimizer_s_per_parameter=5e-9,
    )


def test_recomputed_blocks_take_another_forward_in_the_backward() -> None:
    plan = paced_plan()
    pipeline = plan.pipelines[0]
    stage = pipeline.stages[1].model_copy(update={"recompute": True})
    changed = pipeline.model_copy(update={"stages": (pipeline.stages[0], stage)})
    pace = stage_pace(plan.model_copy(update={"pipelines": (changed,)}), pipeline=0, stage=1)
    assert pace is not None
    assert pace.backward_s == pytest.approx((0.029 + 0.023, 0.037 + 0.031))


def test_real_devices_and_plans_without_times_have_no_pace() -> None:
    for plan in (paced_plan(emulated=False), make_plan()):
        assert stage_pace(plan, pipeline=0, stage=0) is None


def test_missing_time_is_named() -> None:
    assert list(missing_paces(paced_plan())) == []
    ((pipeline, stage, what),) = missing_paces(paced_plan(leave_out=("slow", "head")))
    assert (pipeline, stage) == (0, 1)
    assert "the emulated slow for the head block at tensor_parallel 1, micro_batch_size 1" in what


PACE = StagePace(
    blocks=(3, 6),
    forward_s=(0.010, 0.020, 0.030),
    backward_s=(0.015, 0.025, 0.035),
    optimizer_s_per_parameter=1e-6,
)


def test_actions_take_their_time_and_do_not_drift() -> None:
    pacer = Pacer(PACE)
    start = time.monotonic()
    for _ in range(3):
        pacer.begin()
        pacer.end_forward()
        pacer.begin()
        for block, after in ((5, 0.035), (4, 0.060), (3, 0.075)):
            began = pacer._start
            pacer.end_block_backward(block)
            assert time.monotonic() - began >= after
        pacer.end_backward()
    pacer.begin()
    pacer.end_optimizer(20_000)
    expected = 3 * (0.060 + 0.075) + 0.020
    assert expected <= time.monotonic() - start + 1e-3
    assert time.monotonic() - start < expected * 1.2
    assert pacer._deadline - start == pytest.approx(expected, abs=0.02)


def test_pace_that_cannot_be_kept_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_JUDGE_AFTER_S", 0.0)
    pacer = Pacer(PACE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pacer.begin()
            time.sleep(0.08)
            pacer.end_forward()
    assert pacer.num_missed == 2
    assert pacer.paced_s == pytest.approx(2 * 0.06)
    assert 2 * 0.02 - 1e-3 <= pacer.lost_s < 0.3
    assert pacer.is_behind
    (record,) = caplog.records
    assert "forward just took" in record.getMessage()
    assert "instead of 60.0 ms" in record.getMessage()


def test_oversleeping_is_not_lost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine every sleep ends late; the next action makes up for it."""
    clock = Clock(late_s=0.004)
    monkeypatch.setattr(pacing, "time", clock)
    pacer = Pacer(PACE)
    for action in range(1, 11):
        pacer.begin()
        for block in (5, 4, 3):
            clock.now += 0.001  # real work
            pacer.end_block_backward(block)
        pacer.end_backward()
        assert clock.now == pytest.approx(action * 0.075 + 0.004)
    assert pacer.num_missed == 0
    assert not pacer.is_behind


def test_a_little_lost_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(late_s=0.0)
    monkeypatch.setattr(pacing, "time", clock)
    pacer = Pacer(PACE)
    for lost_s in (0.002, 0.0, 0.0):
        pacer.begin()
        clock.now += 0.060 + lost_s
        pacer.end_forward()
    assert pacer.num_missed == 1
    assert pacer.lost_s == pytest.approx(0.002)
    assert not pacer.is_behind


class Clock:
    """A clock that moves when it is told to, and whose sleeps end late."""

    def __init__(self, *, late_s: float) -> None:
        self.now = 0.0
        self._late_s = late_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s


def test_without_a_pace_nothing_is_waited_for() -> None:
    pacer = Pacer(None)
    start = time.monotonic()
    for _ in range(100):
        pacer.begin()
        pacer.end_forward()
        pacer.end_block_backward(0)
        pacer.end_backward()
        pacer.end_optimizer(10**9)
    assert time.monotonic() - start < 0.1
