"""A run that is killed again and again ends as one that never was."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch.launching import paced_plan, processes_of, wait_until

from eth_cli.launch.checkpoints import find_intact
from eth_cli.launch.config import RunFolder
from eth_cli.plan import Plan, write_plan

pytestmark = [pytest.mark.distributed]

STEPS_EACH = 4
"""So many steps a run gets on the way to each of its ends."""


def quick_plan() -> Plan:
    """The paced plan on three devices, ten times as fast as elsewhere."""
    plan = paced_plan()
    assert plan.pacing is not None
    blocks = [
        block.model_copy(
            update={"forward_s": block.forward_s / 10, "backward_s": block.backward_s / 10}
        )
        for block in plan.pacing.blocks
    ]
    pacing = plan.pacing.model_copy(update={"blocks": tuple(blocks)})
    return plan.model_copy(update={"pacing": pacing})


def start(plan: Path, out: Path, steps: int, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "eth_cli", "run", str(plan), "--steps", str(steps)),
            *("--out", str(out), "--checkpoint-every", "1", "--keep", "3", *more),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def losses(out: Path) -> list[tuple[int, float]]:
    path = RunFolder(out).metrics
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["step"], record["loss"]) for record in records]


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(1, marks=pytest.mark.timeout(240)),
        pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_every_restart_goes_on_from_the_newest_checkpoint(tmp_path: Path, num_kills: int) -> None:
    rng = random.Random(num_kills)
    plan = tmp_path / "plan.json"
    write_plan(plan, quick_plan())
    steps = STEPS_EACH * (num_kills + 1)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert start(plan, whole, steps).wait(180) == 0
    resume: tuple[str, ...] = ()
    for kill in range(num_kills):
        process = start(plan, out, steps, *resume)
        known = STEPS_EACH * kill
        wait_until(
            lambda known=known, process=process: (  # type: ignore[misc] # bound for each round
                process.poll() is not None or any(step > known for step, _ in losses(out))
            ),
            seconds=90,
            what=f"a step after {known}",
        )
        time.sleep(rng.uniform(0, 0.2))
        # Everything of the run at once, as when a machine goes down.
        for pid in [process.pid, *processes_of(out)]:
            with_pid_gone(pid)
        process.wait(30)
        wait_until(lambda: processes_of(out) == {}, seconds=30, what="all processes gone")
        newest = find_intact(RunFolder(out))
        assert newest.damaged == ()
        resume = ("--resume",)
        if newest.info is None:  # it was killed before the first one was complete
            shutil.rmtree(out)
            resume = ()
    assert start(plan, out, steps, *resume).wait(180) == 0
    assert losses(out) == losses(whole)
    newest_info = find_intact(RunFolder(out)).info
    assert newest_info is not None
    assert newest_info.step == steps


def with_pid_gone(pid: int) -> None:
    """Kill a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
