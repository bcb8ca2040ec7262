"""Checkpoints are written while training goes on, and are of the step that they say."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.conftest import RunPlan
from distributed.ranks import RankPool, RanksFailedError
from distributed.training import (
    RandomTokens,
    RankResult,
    make_pipeline,
    make_plan,
    make_spec,
    merged,
    train,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from eth_cli.events import Span, read_events
from eth_cli.launch import checkpoints
from eth_cli.launch.config import RunFolder, RunOptions

pytestmark = pytest.mark.distributed

SPEC = make_spec(tied=True)
PLAN = make_plan([make_pipeline([1, 3], share=(2, 2)), make_pipeline([2], share=(2, 1))])
SHARDED = PLAN.model_copy(update={"sharded_optimizer": True})
SLOW_DISK_S = 0.5


def on_a_slow_disk(rank: int, *arguments: Any) -> RankResult:
    """Train where a rank needs much longer for its tensors than for a step."""
    write_data = FileSystemWriter.write_data

    def write(writer: Any, *args: Any) -> Any:
        time.sleep(SLOW_DISK_S if rank == 1 else 0)
        return write_data(writer, *args)

    setattr(FileSystemWriter, "write_data", write)  # noqa: B010 # mypy forbids the other form
    try:
        return train(rank, *arguments)
    finally:
        setattr(FileSystemWriter, "write_data", write_data)  # noqa: B010 # as above


@pytest.mark.parametrize("plan", [PLAN, SHARDED], ids=["whole", "sharded"])
def test_a_checkpoint_is_of_its_step_though_training_went_on(
    run_plan: RunPlan, pool: RankPool, tmp_path: Path, plan: Any
) -> None:
    options = RunOptions(steps=9, checkpoint_every=3)
    source, root = RandomTokens(35), tmp_path / "slow"
    results = pool.run(on_a_slow_disk, plan, SPEC, options, str(root), source, num_ranks=5)
    folder = RunFolder(root)
    assert sorted(checkpoints.steps_of(folder)) == [3, 6, 9]
    # The second one waited for the first, and has used its buffers; the third is the last save.
    for step in (3, 6, 9):
        assert checkpoints.examine(folder, step, contents=True).fault is None
        one = options.model_copy(update={"checkpoint_every": 0})
        args = (plan, SPEC, one, str(tmp_path / f"until-{step}"), source, step)
        expected = pool.run(train, *args, num_ranks=5)
        there = tmp_path / f"at-{step}"
        shutil.copytree(folder.checkpoint_of(step), RunFolder(there).checkpoint_of(step))
        again = options.model_copy(update={"steps": step, "resume": True})
        loaded = run_plan(plan, SPEC, again, source, root=there)
        for what in ("weights", "moments"):
            ours, theirs = merged(loaded, what), merged(expected, what)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [m.step for m in results[0].metrics] == list(range(1, 10))


def test_training_goes_on_while_a_checkpoint_is_written(pool: RankPool, tmp_path: Path) -> None:
    options = RunOptions(steps=6, checkpoint_every=3)
    args = (PLAN, SPEC, options, str(tmp_path), RandomTokens(35))
    pool.run(on_a_slow_disk, *args, num_ranks=5)
    spans = [e for e in read_events(RunFolder(tmp_path).events_of(0)) if isinstance(e, Span)]
    (written,) = (s for s in spans if s.name == "CHECKPOINT_WRITE")
    stalled = next(s for s in spans if s.name == "CHECKPOINT")
    step = next(s for s in spans if s.name == "STEP" and s.step == 4)
    assert written.duration_s > SLOW_DISK_S
    assert stalled.duration_s < SLOW_DISK_S / 2
    assert written.start_s < step.start_s < step.stop_s < written.stop_s


def rename_fails(rank: int, *arguments: Any) -> RankResult:
    """Train, but rank 0 cannot give the second checkpoint its name."""
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if str(target).endswith("step-000004"):
            raise OSError(30, "Read-only file system")
        replace(source, target)

    setattr(os, "replace", fail)  # noqa: B010 # as above
    try:
        return train(rank, *arguments)
    finally:
        setattr(os, "replace", replace)  # noqa: B010 # as above


def test_a_failure_of_the_first_rank_ends_all_within_a_moment(
    pool: RankPool, tmp_path: Path
) -> None:
    options = RunOptions(steps=500, checkpoint_every=2)
    args = (PLAN, SPEC, options, str(tmp_path), RandomTokens(35))
    with pytest.raises(RanksFailedError) as error:
        pool.run(rename_fails, *args, num_ranks=5)
    folder = RunFolder(tmp_path)
    words = f"LaunchError: {folder.checkpoint_of(4)} cannot be written: "
    assert f"{words}Read-only file system; earlier" in error.value.errors[0]
    for rank in range(1, 5):
        assert f"{words}the remote worker 0 failed: Read-only file" in error.value.errors[rank]
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]


def test_only_the_newest_are_kept(run_plan: RunPlan, tmp_path: Path) -> None:
    options = RunOptions(steps=7, checkpoint_every=1, keep=2)
    run_plan(PLAN, SPEC, options, RandomTokens(35))
    assert sorted(checkpoints.steps_of(RunFolder(tmp_path))) == [6, 7]
