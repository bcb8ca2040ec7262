"""What happens around a step: agreed skips, events, pacing, groups."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_cluster
from distributed.conftest import RunPlan
from distributed.ranks import RankPool, RanksFailedError
from distributed.training import RandomTokens, make_pipeline, make_plan, make_spec

from eth_cli.events import Scalar, Span, read_events
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.launch.runtime.worker import agree_on_plan
from eth_cli.launch.status import StatusWriter, read_status
from eth_cli.model import ModelSpec
from eth_cli.plan import PacedBlock, PacedOptimizer, Pacing, Plan

pytestmark = pytest.mark.distributed

PLAN = make_plan([make_pipeline([1, 3], share=(3, 1)), make_pipeline([2], share=(2, 2))])


def poisoned(rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str) -> Any:
    """Train; in the second step one weight of one rank is not a number."""
    trainer = Trainer(
        plan,
        spec,
        rank=rank,
        options=options,
        folder=RunFolder(root),
        source=RandomTokens(30),
    )
    finite = []
    weight = trainer.parameters[0].parameter.data.view(-1)
    kept: list[dict[str, torch.Tensor]] = []
    for step in range(3):
        healthy = weight[0].clone()
        if step == 1 and rank == 1:
            weight[0] = math.nan
        before = {p.name: p.parameter.detach().clone() for p in trainer.parameters}
        finite.append(trainer.train_step().is_finite)
        kept.append(
            {
                p.name: torch.isclose(before[p.name], p.parameter, 0, 0, equal_nan=True).all()
                for p in trainer.parameters
            }
        )
        if step == 1 and rank == 1:
            weight[0] = healthy
    state = trainer.optimizer.loaded_state()
    steps = {int(tensor) for key, tensor in state.items() if key.startswith("step.")}
    return finite, [any(not same for same in k.values()) for k in kept], steps


def test_step_that_is_not_finite_is_skipped_by_all(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(poisoned, PLAN, make_spec(), RunOptions(steps=3), str(tmp_path), num_ranks=5)
    assert results == [([True, False, True], [True, False, True], {2})] * 5
    lines = [json.loads(line) for line in RunFolder(tmp_path).metrics.read_text().splitlines()]
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    assert "loss" not in lines[1]
    assert "grad_norm" not in lines[1]


def test_events_tell_sync_of_every_segment_with_several_owners(
    run_plan: RunPlan, tmp_path: Path
) -> None:
    run_plan(PLAN, make_spec(tied=True), RunOptions(steps=2), RandomTokens(30))
    for place in PLAN.ranks:
        events = list(read_events(RunFolder(tmp_path).events_of(place.rank)))
        spans = [e for e in events if isinstance(e, Span) and e.step == 2]
        stage = PLAN.pipelines[place.pipeline].stages[place.stage]
        segments = {
            (s.start, s.stop) for s in PLAN.segments if stage.blocks[0] <= s.start < stage.blocks[1]
        }
        tied = {(0, 5)} if stage.blocks[0] == 0 or stage.blocks[1] == 5 else set()
        assert {s.blocks for s in spans if s.name == "SYNC"} == segments | tied
        (step,) = (s for s in spans if s.name == "STEP")
        assert all(
            step.start_s <= s.start_s and s.stop_s <= step.stop_s
            for s in spans
            if s.name != "CHECKPOINT"
        )
        assert sum(s.name == "OPTIMIZER" for s in spans) == 1
        peaks = [e for e in events if isinstance(e, Scalar) and e.name == "peak_memory_bytes"]
        assert peaks[0].value > 1e7


def test_sync_of_late_blocks_starts_before_the_backward_ends(
    run_plan: RunPlan, tmp_path: Path
) -> None:
    plan = make_plan([make_pipeline([4], share=(2, 1)), make_pipeline([], share=(2, 1))])
    run_plan(plan, make_spec(), RunOptions(steps=2), RandomTokens(30))
    (rank,) = plan.ranks_of(1, 0)
    spans = [
        e
        for e in read_events(RunFolder(tmp_path).events_of(rank))
        if isinstance(e, Span) and e.step == 2
    ]
    head = next(s for s in spans if s.name == "SYNC" and s.blocks == (4, 5))
    last = max((s for s in spans if s.name == "B"), key=lambda s: s.stop_s)
    assert last.start_s < head.start_s < last.stop_s


FORWARD_S = {"embedding": 0.002, "transformer": 0.007, "head": 0.011}
BACKWARD_S = {"embedding": 0.003, "transformer": 0.013, "head": 0.019}


def paced(plan: Plan, *, optimizer_s_per_parameter: float) -> Plan:
    blocks = tuple(
        PacedBlock(
            device="fast",
            block=kind,
            tensor_parallel=1,
            micro_batch_size=1,
            forward_s=FORWARD_S[kind],
            backward_s=BACKWARD_S[kind],
        )
        for kind in FORWARD_S
    )
    optimizer = PacedOptimizer(device="fast", optimizer_s_per_parameter=optimizer_s_per_parameter)
    return plan.model_copy(
        update={
            "cluster": make_cluster(nodes={"a": {"fast": 6}}, emulated=True),
            "pacing": Pacing(blocks=blocks, optimizers=(optimizer,)),
        }
    )


def test_emulated_devices_keep_to_their_pace(run_plan: RunPlan, tmp_path: Path) -> None:
    plan = paced(make_plan([make_pipeline([2], share=(4, 1))]), optimizer_s_per_parameter=5e-6)
    spec = make_spec()
    results = run_plan(plan, spec, RunOptions(steps=4), RandomTokens(30))
    forward = [0.002 + 0.007, 2 * 0.007 + 0.011]
    backward = [0.003 + 0.013, 2 * 0.013 + 0.019]
    num_parameters = max(sum(w.numel() for w in r.weights.values()) for r in results)
    # The closed form of 1F1B: the second stage is the slower one.
    expected = forward[0] + backward[0] + 4 * (forward[1] + backward[1]) + num_parameters * 5e-6
    spans = [
        e
        for place in plan.ranks
        for e in read_events(RunFolder(tmp_path).events_of(place.rank))
        if isinstance(e, Span) and e.step is not None and e.step > 1
    ]
    for stage in (0, 1):
        for name, times in (("F", forward), ("B", backward)):
            durations = sorted(s.duration_s for s in spans if s.name == name and s.stage == stage)
            assert durations[len(durations) // 2] == pytest.approx(times[stage], abs=0.002)
    fastest = min(m.step_time_s for m in results[1].metrics[1:])
    assert expected * 0.98 < fastest < expected * 1.15


def test_segment_is_synced_when_its_emulated_backward_is_done(
    run_plan: RunPlan, tmp_path: Path
) -> None:
    plan = make_plan([make_pipeline([4], share=(1, 1)), make_pipeline([], share=(1, 1))])
    plan = paced(plan, optimizer_s_per_parameter=0.0)
    run_plan(plan, make_spec(), RunOptions(steps=2), RandomTokens(30))
    (rank,) = plan.ranks_of(1, 0)
    spans = [
        e
        for e in read_events(RunFolder(tmp_path).events_of(rank))
        if isinstance(e, Span) and e.step == 2
    ]
    (backward,) = (s for s in spans if s.name == "B")
    head = next(s for s in spans if s.name == "SYNC" and s.blocks == (4, 5))
    assert head.start_s - backward.start_s == pytest.approx(0.019, abs=0.003)


def disagreeing(rank: int, plans: list[Plan]) -> None:
    agree_on_plan(plans[rank], device=torch.device("cpu"))


def test_ranks_with_different_plans_stop_before_training(pool: RankPool) -> None:
    other = PLAN.model_copy(update={"model": "another"})
    assert pool.run(disagreeing, [PLAN, PLAN, PLAN], num_ranks=3) == [None] * 3
    with pytest.raises(RanksFailedError, match="ranks 2 read another") as error:
        pool.run(disagreeing, [PLAN, PLAN, other], num_ranks=3)
    assert set(error.value.errors) == {0, 1, 2}
    assert "ranks 0, 1 read another plan.json than rank 2" in error.value.errors[2]


def with_status(rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str) -> Any:
    """Train one step and collect what the status file said after each of its changes."""
    folder = RunFolder(root)
    path = folder.status_of(rank)
    seen = []

    class Spy(StatusWriter):
        def update(self, **kwargs: Any) -> None:
            super().update(**kwargs)
            status = read_status(path)
            assert status is not None
            seen.append((status.state, status.step, status.operation, status.waits))

    trainer = Trainer(
        plan,
        spec,
        rank=rank,
        options=options,
        folder=folder,
        source=RandomTokens(30),
        status=Spy(path, rank=rank),
    )
    trainer.train()
    return seen


def test_status_tells_each_operation_before_it_happens(pool: RankPool, tmp_path: Path) -> None:
    plan = make_plan([make_pipeline([2], share=(2, 1))])
    first, last = pool.run(
        with_status, plan, make_spec(), RunOptions(steps=1), str(tmp_path), num_ranks=2
    )
    training = [entry[1:] for entry in last if entry[0] == "training"]
    assert training == [
        (1, "1F0", True),  # the activation may not be there yet
        (1, "1F0", False),
        (1, "1B0", False),  # the last stage has its loss at hand
        (1, "1B0", False),
        (1, "1F1", True),
        (1, "1F1", False),
        (1, "1B1", False),
        (1, "1B1", False),
        (1, "SEND", True),
        (1, "SYNC", True),
        (1, "AGREE", True),
        (1, "OPTIMIZER", False),
    ]
    assert ("training", 1, "0B0", True) in first
    assert first[-1] == ("saving", 1, "CHECKPOINT", True)
