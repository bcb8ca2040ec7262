"""Workers as torchrun starts them: checks before the first collective, stop, resume, failures."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eth_cli import processes, serde, torchrun
from eth_cli.errors import ConfigError
from eth_cli.launch import checkpoints
from eth_cli.launch.config import DataOptions, DataPath, RunFolder, RunOptions
from eth_cli.launch.runtime import worker
from eth_cli.launch.status import read_status
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan, write_plan

pytestmark = pytest.mark.distributed

NO_DATA = DataOptions(paths=(DataPath(path="/no/such"),))

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    vocab_size=256,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
    max_positions=64,
    activation="silu",
    tied=True,
    embedding_size=16,
)


def make_plan(**changes: Any) -> Plan:
    """Two pipelines of two stages and of one, over two nodes."""
    data = {
        "schema_version": 1,
        "model": "tiny",
        "seq_len": 32,
        "dtype": "fp32",
        "global_batch_size": 4,
        "pipelines": [
            {
                "micro_batches": 3,
                "micro_batch_size": 1,
                "stages": [
                    {"blocks": [0, 2], "devices": ["a:0"]},
                    {"blocks": [2, 4], "devices": ["b:0"]},
                ],
            },
            {
                "micro_batches": 1,
                "micro_batch_size": 1,
                "stages": [{"blocks": [0, 4], "devices": ["b:1"]}],
            },
        ],
        "model_spec": serde.to_data(SPEC),
    }
    return serde.validate(Plan, data | changes, "plan of a test")


def prepare(root: Path, plan: Plan, **options: Any) -> RunFolder:
    """A run folder as the launcher makes it."""
    folder = RunFolder(root)
    write_plan(folder.plan, plan)
    chosen = RunOptions.model_validate(
        {"steps": 4, "plan_digest": plan.digest(), "start_timeout_s": 60.0, **options}
    )
    serde.write_json(folder.options, chosen)
    return folder


def run_workers(
    folder: RunFolder,
    *,
    num_ranks: int = 3,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Exit code and output of torchrun with the workers of a run folder."""
    folder.logs.mkdir(exist_ok=True)
    command = torchrun.argv(
        num_ranks=num_ranks,
        module="eth_cli.launch.runtime.worker",
        args=[str(folder.root)],
        log_dir=folder.logs,
    )
    output = folder.root / "torchrun.log"
    process = processes.start(command, env=torchrun.worker_env(), output=output)
    try:
        meanwhile()
        code = process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail(f"workers did not end:\n{output.read_text()}")
    finally:
        processes.stop_process_tree(process, grace_s=0)
    logs = "".join(path.read_text() for path in sorted(folder.logs.glob("rank-*.log")))
    return code, logs


def states(folder: RunFolder, num_ranks: int = 3) -> list[str]:
    found = [read_status(folder.status_of(rank)) for rank in range(num_ranks)]
    return [status.state if status is not None else "none" for status in found]


def steps_of(folder: RunFolder) -> list[int]:
    if not folder.metrics.exists():
        return []
    lines = folder.metrics.read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_stop_file_ends_a_run_well_and_resume_finishes_it(tmp_path: Path) -> None:
    folder = prepare(tmp_path, make_plan(), steps=100_000)

    def stop_after_some_steps() -> None:
        deadline = time.monotonic() + 50
        while len(steps_of(folder)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        folder.stop.touch()

    code, logs = run_workers(folder, meanwhile=stop_after_some_steps)
    assert (code, logs) == (0, "")
    assert states(folder) == ["stopped"] * 3
    newest = checkpoints.find_intact(folder).info
    assert newest is not None
    last = newest.step
    assert 3 <= last < 100_000
    assert steps_of(folder) == list(range(1, last + 1))

    folder.stop.unlink()
    plan = make_plan(
        pipelines=[
            {
                "micro_batches": 2,
                "micro_batch_size": 2,
                "stages": [
                    {"blocks": [0, 1], "devices": ["a:0"]},
                    {"blocks": [1, 4], "devices": ["b:0"]},
                ],
            }
        ]
    )
    prepare(tmp_path, plan, steps=last + 2, resume=True)
    code, logs = run_workers(folder, num_ranks=2)
    assert (code, logs) == (0, "")
    assert states(folder, 2) == ["done"] * 2
    assert steps_of(folder) == list(range(1, last + 3))


def test_failure_names_rank_place_and_step(tmp_path: Path) -> None:
    """The disk under the checkpoints is gone: a file stands where the folder should be."""
    folder = prepare(tmp_path, make_plan(), steps=2)
    folder.checkpoints.write_text("not a folder")
    code, logs = run_workers(folder)
    assert code != 0
    (line,) = [line for line in logs.splitlines() if line.startswith("rank 0 ")]
    assert line.startswith("rank 0 (a:0, pipeline 0, stage 0) failed in step 2, CHECKPOINT: ")
    assert "Traceback" not in logs
    status = read_status(folder.status_of(0))
    assert status is not None
    assert (status.state, status.step, status.operation) == ("failed", 2, "CHECKPOINT")
    assert "step-000002 cannot be written: Not a directory; earlier checkpoints" in status.error
    assert line.endswith(status.error)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What torchrun tells a rank: all on one machine, unless said otherwise."""

    def set_all(rank: int, *, world: int = 3, local: int | None = None, num_local: int = 3) -> None:
        values = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank if local is None else local,
            "LOCAL_WORLD_SIZE": num_local,
        }
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


def check(folder: RunFolder, rank: int, world_size: int = 3) -> None:
    plan = make_plan()
    options = serde.read_json(folder.options, RunOptions)
    worker.check_place(plan, options, rank=rank, world_size=world_size, folder=folder)


def test_rank_on_the_planned_machine_is_accepted(
    environment: Callable[..., None], tmp_path: Path
) -> None:
    folder = prepare(tmp_path, make_plan())
    for rank in range(3):
        environment(rank)
        check(folder, rank)
    for rank, local, num_local in ((0, 0, 1), (1, 0, 2), (2, 1, 2)):
        environment(rank, local=local, num_local=num_local)
        check(folder, rank)


def test_rank_on_another_machine_is_refused(
    environment: Callable[..., None], tmp_path: Path
) -> None:
    folder = prepare(tmp_path, make_plan())
    environment(1, local=1, num_local=2)
    with pytest.raises(ConfigError, match="ranks 1 to 2 on node b, but rank 1 was started on a"):
        check(folder, 1)


def test_wrong_number_of_ranks_is_refused(environment: Callable[..., None], tmp_path: Path) -> None:
    folder = prepare(tmp_path, make_plan())
    environment(0, world=2, num_local=2)
    with pytest.raises(ConfigError, match="need 3 ranks, but 2 were started"):
        check(folder, 0, world_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: write_plan(folder.plan, make_plan(seq_len=31)), "has digest sha256:"),
        (lambda folder: folder.plan.write_text('{"schema_version": 1'), "is not valid JSON"),
        (lambda folder: folder.options.unlink(), "no such file"),
        (lambda folder: prepare(folder.root, make_plan(), data=NO_DATA), "no such file"),
        (lambda folder: prepare(folder.root, make_plan(model_spec=None)), "is missing"),
    ],
)
def test_bad_input_ends_a_rank_in_one_line_before_it_connects(
    environment: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[RunFolder], object],
    message: str,
) -> None:
    folder = prepare(tmp_path, make_plan())
    change(folder)
    environment(1)
    assert worker.main([str(tmp_path)]) == 2
    assert not torch.distributed.is_initialized()
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    status = read_status(folder.status_of(1))
    assert status is not None
    assert status.state == "failed"
    assert message in status.error
    assert line.startswith("rank 1")
    assert line.split(": ", 1)[1].startswith(status.error)  # which is cut to its field's size
