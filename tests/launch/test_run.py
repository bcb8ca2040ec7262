"""Real runs of a tiny model: killed, hung, interrupted, resumed, two at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch.launching import paced_plan, processes_of, wait_until

from eth_cli.errors import ConfigError, LaunchError
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.run import Progress, RunResult, run_plan
from eth_cli.launch.status import read_status
from eth_cli.plan import write_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

MANY = 1000
"""Steps that no test waits for."""


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A run folder, of whose run nothing is left after the test, also when it fails."""
    folder = tmp_path / "run"
    yield folder
    left = processes_of(folder)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def signal_rank(folder: Path, rank: int, number: signal.Signals) -> None:
    pids = [pid for pid, of_rank in processes_of(folder).items() if of_rank == rank]
    assert len(pids) == 1, pids
    os.kill(pids[0], number)


def run_and_signal(out: Path, rank: int, number: signal.Signals) -> tuple[LaunchError, float]:
    """Send a rank a signal in the middle of step 2; the error, and how long it took to come."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        signal_rank(out, rank, number)

    def on_progress(progress: Progress) -> None:
        if progress.step == 1:
            threading.Timer(0.25, send).start()

    with pytest.raises(LaunchError) as caught:
        run_plan(
            paced_plan(),
            RunOptions(steps=MANY, hang_timeout_s=4.0),
            out,
            on_progress=on_progress,
        )
    return caught.value, time.monotonic() - sent[0]


def test_case_48_a_worker_killed_within_a_step(out: Path) -> None:
    error, seconds = run_and_signal(out, 1, signal.SIGKILL)
    assert seconds < 15
    assert processes_of(out) == {}
    assert (error.exit_code, error.rank, error.device) == (4, 1, "a:0")
    assert (error.pipeline, error.stage) == (1, 1)
    assert error.step in (2, 3)
    assert error.operation
    assert "was killed by SIGKILL" in str(error)
    assert error.log_path == str(RunFolder(out).log_of(1))


def test_a_worker_that_alone_is_asked_to_stop_stops_all_with_a_checkpoint(out: Path) -> None:
    error, seconds = run_and_signal(out, 2, signal.SIGTERM)
    assert seconds < 15
    assert (error.exit_code, error.rank, error.device) == (4, 2, "a:1")
    assert "was asked to stop (SIGTERM), and all ranks stopped with it" in str(error)
    assert error.step is not None
    assert RunFolder(out).marker_of(error.step).is_file()


def test_a_worker_stopped_within_a_step(out: Path) -> None:
    error, seconds = run_and_signal(out, 2, signal.SIGSTOP)
    assert seconds < 4.0 + 15
    assert processes_of(out) == {}
    assert (error.rank, error.device, error.pipeline, error.stage) == (2, "a:1", 1, 0)
    assert error.step in (2, 3)
    assert "SIGSTOP" in str(error)


def test_a_worker_killed_while_it_starts(out: Path) -> None:
    folder = RunFolder(out)

    def kill_early() -> None:
        wait_until(lambda: 0 in processes_of(out).values(), seconds=60, what="rank 0 exists")
        signal_rank(out, 0, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_early)
        with pytest.raises(LaunchError) as caught:
            run_plan(paced_plan(num_ranks=2), RunOptions(steps=MANY), out)
        killed.result()
    assert caught.value.rank == 0
    assert "SIGKILL" in str(caught.value)
    assert not folder.metrics.exists()


def test_two_runs_at_once_both_finish(tmp_path: Path) -> None:
    progress: dict[str, list[int]] = {"one": [], "two": []}

    def run(name: str) -> RunResult:
        return run_plan(
            paced_plan(num_ranks=2),
            RunOptions(steps=3, seed=len(name)),
            tmp_path / name,
            on_progress=lambda p: progress[name].append(p.step),
        )

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, progress))
    assert progress == {"one": [1, 2, 3], "two": [1, 2, 3]}
    for name, result in zip(progress, results, strict=True):
        folder = RunFolder(tmp_path / name)
        assert result.out == folder.root
        assert (result.steps, result.first_step, result.stopped) == (3, 0, False)
        assert result.loss is not None
        assert result.median_step_time_s is not None
        assert 0.2 < result.median_step_time_s < 5
        assert folder.log_of(0).is_file()
        assert folder.log_of(1).is_file()
        assert folder.checkpoint_of(3).is_dir()
        assert not folder.status.exists()  # gone once the run has ended well
        assert processes_of(folder.root) == {}


def eth_run(plan: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    """`eth run` as a user's shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "eth_cli", "run", str(plan), "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_trained(out: Path, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, process.communicate()[1]
    metrics = RunFolder(out).metrics
    return metrics.exists() and metrics.read_text() != ""


def test_ctrl_c_leaves_a_checkpoint_that_is_resumed_on_another_plan(
    out: Path, tmp_path: Path
) -> None:
    write_plan(tmp_path / "plan.json", paced_plan(num_ranks=2))
    with eth_run(tmp_path / "plan.json", out, "--steps", str(MANY)) as process:
        wait_until(lambda: has_trained(out, process), seconds=60, what="a step is done")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert "Traceback" not in told
    assert process.returncode == 130, told
    assert "Ctrl-C: stopping after the step in progress, with a checkpoint;" in told
    assert told.splitlines()[-1].startswith("error: Ctrl-C: stopped after step ")
    assert processes_of(out) == {}
    folder = RunFolder(out)
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    (checkpoint,) = folder.checkpoints.iterdir()
    assert checkpoint == folder.checkpoint_of(steps[-1])
    assert not folder.stop.exists()

    with pytest.raises(ConfigError, match="is not empty; go on with the run in it by --resume"):
        run_plan(paced_plan(), RunOptions(steps=steps[-1] + 1), out)
    resumed = run_plan(paced_plan(), RunOptions(steps=steps[-1] + 1, resume=True), out)
    assert (resumed.first_step, resumed.steps) == (steps[-1], steps[-1] + 1)
    # The events of the first plan's ranks are kept apart from those of the second's.
    assert (out / f"events-until-step-{steps[-1]:06d}" / "rank-1.jsonl").exists()
    assert {path.name for path in folder.events.iterdir()} == {f"rank-{r}.jsonl" for r in range(3)}
    lines = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert lines == [*steps, steps[-1] + 1]


def test_no_worker_outlives_a_killed_launcher(out: Path, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", paced_plan(num_ranks=2))
    with eth_run(tmp_path / "plan.json", out, "--steps", str(MANY)) as process:
        wait_until(
            lambda: read_status(RunFolder(out).status_of(1)) is not None,
            seconds=60,
            what="rank 1 says something",
        )
        process.kill()
        process.communicate(timeout=20)
    wait_until(lambda: processes_of(out) == {}, seconds=10, what="all workers are gone")
