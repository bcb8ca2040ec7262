"""A run goes on from its newest whole checkpoint, under any plan, as if it had never stopped."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
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

from eth_cli.errors import ConfigError
from eth_cli.launch import checkpoints
from eth_cli.launch.config import CHECKPOINT_MARKER, RunFolder, RunOptions
from eth_cli.launch.order import SampleOrder
from eth_cli.launch.runtime import checkpoint
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan

pytestmark = pytest.mark.distributed

SPEC = make_spec(tied=True)
PLAN_A = make_plan([make_pipeline([1, 3], share=(2, 2)), make_pipeline([2], share=(2, 1))])
PLAN_B = make_plan(
    [
        make_pipeline([4], share=(1, 2)),
        make_pipeline([1], share=(3, 1)),
        make_pipeline([3], share=(1, 1)),
    ]
)
STEPS, HALF = 40, 20
NUM_SAMPLES = 35
"""Not a multiple of the global batch, so that epochs end within batches."""


@pytest.fixture(scope="module")
def runs(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[RunFolder, list[RankResult]]]:
    """40 steps on plan A; 20 on plan A, and 20 more on plan A again and on plan B."""
    # Epsilon: see EPSILON in test_parity.
    options = RunOptions(steps=STEPS, sample_log=True, warmup_steps=3, epsilon=1e-5)
    source = RandomTokens(NUM_SAMPLES)
    whole, parts, same = (tmp_path_factory.mktemp(name) for name in ("whole", "parts", "same"))

    def run(plan: Plan, root: Path, options: RunOptions, stop_after: int | None) -> Any:
        args = (plan, SPEC, options, str(root), source, stop_after)
        return RunFolder(root), pool.run(train, *args, num_ranks=len(plan.ranks))

    result = {"whole": run(PLAN_A, whole, options, None)}
    result["first"] = run(PLAN_A, parts, options, HALF)
    resumed = options.model_copy(update={"resume": True})
    shutil.copytree(parts, same, dirs_exist_ok=True)
    result["same"] = run(PLAN_A, same, resumed, None)
    result["second"] = run(PLAN_B, parts, resumed, None)
    return result


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stop_is_agreed_and_leaves_a_checkpoint(runs: Any) -> None:
    folder, results = runs["first"]
    assert all(r.stopped and len(r.metrics) == HALF for r in results)
    assert (folder.checkpoint_of(HALF) / CHECKPOINT_MARKER).exists()


def test_case_39_resumed_run_equals_uninterrupted_one(runs: Any) -> None:
    whole, second = runs["whole"][1], runs["second"][1]
    assert [m.step for m in second[0].metrics] == list(range(HALF + 1, STEPS + 1))
    losses = [m.loss for m in whole[0].metrics[HALF:]]
    assert [m.loss for m in second[0].metrics] == pytest.approx(losses, rel=1e-5)
    expected, weights = merged(whole, "weights"), merged(second, "weights")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_resumed_on_the_same_plan_it_is_bit_identical(runs: Any) -> None:
    whole, same = runs["whole"][1], runs["same"][1]
    assert [m.loss for m in same[0].metrics] == [m.loss for m in whole[0].metrics[HALF:]]
    for a, b in zip(whole, same, strict=True):
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        assert all(torch.equal(a.moments[name], b.moments[name]) for name in a.moments)


def test_case_39_no_sample_is_repeated_or_lost(runs: Any) -> None:
    order = SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=6, seed=0)
    for name in ("whole", "second"):
        folder = runs[name][0]
        by_step: dict[int, list[int]] = {}
        for path in sorted(folder.samples.iterdir()):
            for line in read_lines(path):
                by_step.setdefault(line["step"], []).extend(line["samples"])
        assert sorted(by_step) == list(range(1, STEPS + 1))
        for step, samples in by_step.items():
            assert sorted(samples) == sorted(order.batch(step - 1))
        trained = sorted(s for step in range(1, STEPS + 1) for s in by_step[step])
        least = STEPS * 6 // NUM_SAMPLES
        assert all(trained.count(i) in (least, least + 1) for i in range(NUM_SAMPLES))


def test_case_40_moments_equal_element_by_element(runs: Any) -> None:
    expected, moments = (merged(runs[name][1], "moments") for name in ("whole", "second"))
    assert moments.keys() == expected.keys()
    for name, moment in moments.items():
        torch.testing.assert_close(moment, expected[name], rtol=1e-4, atol=1e-7)


def test_metrics_of_a_resumed_run_are_one_sequence(runs: Any) -> None:
    lines = read_lines(runs["second"][0].metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(
        set(line) == {"step", "loss", "grad_norm", "lr", "tokens", "step_time_s"} for line in lines
    )


def loaded(
    rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str, source: Any
) -> RankResult:
    """What a rank holds right after it resumed, before it trains: zero further steps."""
    options = options.model_copy(update={"steps": HALF, "resume": True})
    return train(rank, plan, spec, options, root, source)


def test_case_40_moments_are_loaded_bit_by_bit(runs: Any, pool: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    folder, saved = runs["first"]
    shutil.copytree(folder.checkpoint_of(HALF), RunFolder(root).checkpoint_of(HALF))
    options = RunOptions(steps=HALF)
    args = (PLAN_B, SPEC, options, str(root), RandomTokens(NUM_SAMPLES))
    results = pool.run(loaded, *args, num_ranks=6)
    for what in ("weights", "moments"):
        expected, found = merged(saved, what), merged(results, what)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def die_while_saving(
    rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str, source: Any
) -> RankResult:
    """Train, but rank 1 is killed once it has written its tensors of the second checkpoint."""
    if rank == 1:
        write_data = FileSystemWriter.write_data

        def write_and_die(writer: Any, *args: Any) -> Any:
            future = write_data(writer, *args)
            if "step-000004" in str(writer.path):
                os.kill(os.getpid(), signal.SIGKILL)
            return future

        setattr(FileSystemWriter, "write_data", write_and_die)  # noqa: B010 # mypy forbids the other form
    return train(rank, plan, spec, options, root, source)


def test_kill_while_saving_leaves_the_previous_checkpoint(
    run_plan: RunPlan, pool: RankPool, tmp_path: Path
) -> None:
    options = RunOptions(steps=6, checkpoint_every=2)
    source = RandomTokens(NUM_SAMPLES)
    folder = RunFolder(tmp_path)
    with pytest.raises(RanksFailedError) as error:
        pool.run(die_while_saving, PLAN_A, SPEC, options, str(tmp_path), source, num_ranks=5)
    assert error.value.errors[1] == "died"
    assert (folder.checkpoints / ".step-000004.tmp").is_dir()
    newest = checkpoints.find_intact(folder).info
    assert newest is not None
    assert newest.step == 2

    results = run_plan(PLAN_B, SPEC, options.model_copy(update={"resume": True}), source)
    assert [m.step for m in results[0].metrics] == [3, 4, 5, 6]
    newest = checkpoints.find_intact(folder).info
    assert newest is not None
    assert newest.step == 6
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    assert not list(folder.checkpoints.glob(".*"))  # what was left half-written is gone


def fill_the_disk_while_saving(
    rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str, source: Any
) -> RankResult:
    """Train, but on rank 1 the disk is full when it writes its tensors of the second checkpoint."""
    if rank == 1:
        write_data = FileSystemWriter.write_data

        def fail(writer: Any, *args: Any) -> Any:
            if "step-000004" not in str(writer.path):
                return write_data(writer, *args)
            usage = shutil.disk_usage(root)
            setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))  # noqa: B010 # as above
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5")

        setattr(FileSystemWriter, "write_data", fail)  # noqa: B010 # as above
    return train(rank, plan, spec, options, root, source)


def test_full_disk_while_saving_is_told_and_leaves_the_previous_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    options = RunOptions(steps=6, checkpoint_every=2)
    args = (PLAN_A, SPEC, options, str(tmp_path), RandomTokens(NUM_SAMPLES))
    with pytest.raises(RanksFailedError) as error:
        pool.run(fill_the_disk_while_saving, *args, num_ranks=5)
    folder = RunFolder(tmp_path)
    words = f"LaunchError: {folder.checkpoint_of(4)} cannot be written: "
    errors = error.value.errors
    assert f"{words}No space left on device; earlier checkpoints are untouched" in errors[1]
    for rank in (0, 2, 3, 4):
        assert f"{words}the remote worker 1 failed: No space left on device" in errors[rank]
    found = checkpoints.find_intact(folder)
    assert found.info is not None
    assert (found.info.step, found.damaged) == (2, ())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]


def test_a_checkpoint_that_cannot_be_loaded_is_named(
    runs: Any, pool: RankPool, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    shutil.copytree(runs["first"][0].checkpoint_of(HALF), folder.checkpoint_of(HALF))
    (folder.checkpoint_of(HALF) / "__1_0.distcp").unlink()
    # As if it had been lost since the launcher looked.
    options = RunOptions(steps=HALF, resume_step=HALF)
    args = (PLAN_A, SPEC, options, str(tmp_path), RandomTokens(NUM_SAMPLES))
    with pytest.raises(RanksFailedError) as error:
        pool.run(loaded, *args, num_ranks=5)
    words = f"LaunchError: {folder.checkpoint_of(HALF)} cannot be loaded: "
    assert all(words in text for text in error.value.errors.values())
    assert any(f"{words}No such file or directory" in e for e in error.value.errors.values())


def make_checkpoint(folder: RunFolder, step: int) -> checkpoints.CheckpointInfo:
    info = checkpoints.CheckpointInfo.of(
        step=step,
        plan=PLAN_A,
        spec=SPEC,
        options=RunOptions(steps=9, seed=5),
        data_digest="this",
    )
    path = folder.checkpoint_of(step)
    path.mkdir(parents=True)
    (path / CHECKPOINT_MARKER).write_text(info.model_dump_json())
    return info


def test_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert checkpoints.find_intact(folder).info is None
    expected = make_checkpoint(folder, 3)
    make_checkpoint(folder, 4)
    (folder.checkpoint_of(4) / CHECKPOINT_MARKER).write_text('{"step": 4,')
    folder.checkpoint_of(5).mkdir()
    make_checkpoint(folder, 6).model_dump()
    folder.checkpoint_of(6).rename(folder.checkpoints / ".step-000006.tmp")
    make_checkpoint(folder, 7)
    folder.checkpoint_of(7).rename(folder.checkpoint_of(8))  # says 7, is named 8
    assert checkpoints.find_intact(folder).info == expected


def test_resume_is_refused_where_it_would_not_be_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    info = make_checkpoint(folder, 3)
    checkpoints.check_resumable(
        info,
        plan=PLAN_B,
        spec=SPEC,
        options=RunOptions(steps=3, seed=5),
        data_digest="this",
        folder=folder,
    )
    other = PLAN_A.model_copy(update={"seq_len": 7, "global_batch_size": 11})
    with pytest.raises(ConfigError) as error:
        checkpoints.check_resumable(
            info,
            plan=other,
            spec=make_spec(num_layers=4),
            options=RunOptions(steps=2, seed=6),
            data_digest="that",
            folder=folder,
        )
    faults = {fault.field: fault.message for fault in error.value.faults}
    assert set(faults) == {
        "model_digest",
        "seq_len",
        "global_batch_size",
        "seed",
        "step",
        "data_digest",
    }
    assert "seed 5, but this run has 6" in faults["seed"]
    assert all(fault.file.endswith("complete.json") for fault in error.value.faults)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/eth-checkpoint-was-run",)


def test_index_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for posix\.system"):
        checkpoint._Reader(tmp_path).read_metadata()
