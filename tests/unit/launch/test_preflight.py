"""What is refused before a worker is started, and what the run folder must be like."""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from builders import make_cluster, make_pipeline, make_plan, make_profile
from launch.launching import paced_plan

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.events import Instant, write_events
from eth_cli.launch.config import DataOptions, DataPath, RunFolder, RunOptions
from eth_cli.launch.folder import locked, prepare_folder
from eth_cli.launch.run import check_runnable, dry_run, run_plan
from eth_cli.plan import DeviceMemory, Plan, Prediction, read_plan, write_plan
from eth_cli.profile.table import read_profile

OPTIONS = RunOptions(steps=3)
GOLDEN = Path(__file__).parents[2] / "launch" / "golden"


def changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields, checked as if it had been read."""
    return Plan.model_validate(plan.model_dump() | changes)


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of this file that starts a process has failed."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr("eth_cli.torchrun.start", refuse)


def refused(plan: Plan, out: Path, options: RunOptions = OPTIONS, **more: Any) -> ConfigError:
    """The error of a run that is refused, having left no trace; a dry run says the same."""
    existed = out.exists()
    with pytest.raises(ConfigError) as caught:
        run_plan(plan, options, out, **more)
    assert out.exists() == existed
    with pytest.raises(ConfigError) as dry:
        dry_run(plan, options, out, **more)
    assert str(dry.value) == str(caught.value)
    return caught.value


# --- Plans ----------------------------------------------------------------------------------------


def test_a_plan_that_can_run_gives_its_model() -> None:
    assert check_runnable(paced_plan()).name == "gpt-tiny"


def test_a_plan_without_a_model_asks_for_one(tmp_path: Path) -> None:
    error = refused(changed(paced_plan(), model_spec=None), tmp_path / "run")
    assert [(f.file, f.field) for f in error.faults] == [("plan.json", "model_spec")]
    assert "--model" in str(error)


def test_emulated_devices_without_times_ask_for_the_profile(tmp_path: Path) -> None:
    error = refused(changed(paced_plan(), pacing=None), tmp_path / "run")
    assert "fast, slow is emulated" in str(error)
    assert "--profile and --cluster" in str(error)


def test_a_time_that_is_missing_is_named(tmp_path: Path) -> None:
    plan = paced_plan()
    assert plan.pacing is not None
    blocks = [b for b in plan.pacing.blocks if (b.device, b.block) != ("slow", "head")]
    error = refused(
        changed(plan, pacing=plan.pacing.model_copy(update={"blocks": tuple(blocks)})),
        tmp_path / "run",
    )
    assert "pipelines[0].stages[0]" in str(error)
    assert "head" in str(error)


def test_everything_that_stands_against_a_run_is_told_at_once(tmp_path: Path) -> None:
    plan = changed(paced_plan(), seq_len=257, pacing=None)
    fields = [fault.field for fault in refused(plan, tmp_path / "run").faults]
    assert fields == ["seq_len", "pacing"]


def test_a_sequence_longer_than_the_learned_positions(tmp_path: Path) -> None:
    error = refused(changed(paced_plan(), seq_len=257), tmp_path / "run")
    assert "is 257, but gpt-tiny has learned positions for 256" in str(error)


def test_a_plan_that_is_predicted_not_to_fit_is_not_started(tmp_path: Path) -> None:
    memory = (
        DeviceMemory(device="a:0", bytes=10, capacity_bytes=10),
        DeviceMemory(device="b:0", bytes=28 * 2**30, capacity_bytes=16 * 2**30),
    )
    predicted = Prediction(step_time_s=1.0, tokens_per_s=2.0, memory=memory)
    error = refused(changed(paced_plan(), predicted=predicted), tmp_path / "run")
    (fault,) = error.faults
    assert fault.field == "predicted.memory[1]"
    assert "b:0 needs 28.0 GiB, but has 16.0 GiB" in fault.message


def test_real_nodes_are_refused_by_the_local_backend(tmp_path: Path) -> None:
    plan = changed(paced_plan(), cluster=make_cluster())
    assert "uses 2 nodes (b, a)" in str(refused(plan, tmp_path / "run"))


@pytest.mark.parametrize("backend", ["ssh", "slurm", "kubernetes", "cloud"])
def test_other_backends_are_refused(tmp_path: Path, backend: str) -> None:
    error = refused(paced_plan(), tmp_path / "run", backend=backend)
    assert backend in str(error)


# --- Data -----------------------------------------------------------------------------------------


def test_data_is_checked_before_the_start(tmp_path: Path) -> None:
    for name, content in (("empty.txt", b""), ("short.txt", b"abc"), ("latin.txt", b"\xe9" * 99)):
        data = tmp_path / name
        data.write_bytes(content)
        options = RunOptions(steps=3, data=DataOptions(paths=(DataPath(path=str(data)),)))
        assert name in str(refused(paced_plan(), tmp_path / "run", options))
    absent = DataPath(path=str(tmp_path / "absent.txt"))
    options = RunOptions(steps=3, data=DataOptions(paths=(absent,)))
    assert "absent.txt" in str(refused(paced_plan(), tmp_path / "run", options))


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_not_mixed_into(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious").write_text("mine")
    assert "is not empty; give another folder" in str(refused(paced_plan(), out))
    (out / "checkpoints" / "step-000002").mkdir(parents=True)
    assert "--resume" in str(refused(paced_plan(), out))
    assert (out / "precious").read_text() == "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    assert "is a file" in str(refused(paced_plan(), tmp_path / "run"))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"resume": True})
    out = tmp_path / "run"
    assert "holds no complete checkpoint" in str(refused(paced_plan(), out, options))
    # One that was being written when the run was killed is none.
    (out / "checkpoints" / ".step-000001.tmp").mkdir(parents=True)
    assert "holds no complete checkpoint" in str(refused(paced_plan(), out, options))
    (out / "checkpoints" / "step-000002").mkdir()
    (fault,) = refused(paced_plan(), out, options).faults
    assert "holds no intact checkpoint" in fault.message
    assert "step-000002/complete.json: no such file" in fault.message


def test_a_folder_is_made_ready_for_workers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    plan = paced_plan()
    data = DataOptions(
        paths=(DataPath(path="some/text.txt", weight=0.5),), tokenizer="t.json", cache="cache"
    )
    prepare_folder(folder, plan, RunOptions(steps=3, data=data), profile=None, first_step=0)
    assert read_plan(folder.plan) == plan
    options = serde.read_json(folder.options, RunOptions)
    assert options.plan_digest == plan.digest()
    # Wherever the workers run:
    assert options.data == DataOptions(
        paths=(DataPath(path=f"{Path.cwd()}/some/text.txt", weight=0.5),),
        tokenizer=f"{Path.cwd()}/t.json",
        cache=f"{Path.cwd()}/cache",
    )
    assert DataOptions(tokenizer="bytes").absolute() == DataOptions(tokenizer="bytes")
    assert not folder.profile.exists()
    for path in (folder.events, folder.logs, folder.status, folder.checkpoints):
        assert list(path.iterdir()) == []


def test_what_an_earlier_run_left_is_put_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    plan = paced_plan()
    prepare_folder(folder, plan, OPTIONS, profile=make_profile(), first_step=0)
    folder.stop.touch()
    (folder.status / "rank-2").write_text("old")
    write_events(folder.events_of(1), [Instant(rank=1, name="x", time_s=1.0)])
    folder.metrics.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)))

    prepare_folder(folder, plan, OPTIONS, profile=None, first_step=2)
    assert not folder.stop.exists()
    assert list(folder.status.iterdir()) == []
    assert folder.events_of(1).exists()  # the same plan goes on
    assert read_profile(folder.profile) == make_profile()
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]

    prepare_folder(folder, paced_plan(num_ranks=2), OPTIONS, profile=None, first_step=2)
    assert list(folder.events.iterdir()) == []
    assert (folder.root / "events-until-step-000002" / "rank-1.jsonl").exists()
    assert not folder.profile.exists()  # it was about the other plan


def _hold(root: str, held: Event, release: Event) -> None:
    with locked(RunFolder(root)):
        held.set()
        release.wait(30)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path / "run"), held, release))
    other.start()
    try:
        assert held.wait(30)
        with (
            pytest.raises(ConfigError, match="is in use by another run"),
            locked(RunFolder(tmp_path / "run")),
        ):
            pytest.fail("two hold it")
    finally:
        release.set()
        other.join(30)
    with locked(RunFolder(tmp_path / "run")):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        locked(RunFolder(tmp_path / "file" / "run")),
    ):
        pytest.fail("it cannot be held")


# --- Dry runs -------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_exact_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite tests/launch/golden/local.txt by hand when this changes on purpose."""
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    out = Path("/runs/my first run")
    text = dry_run(paced_plan(), OPTIONS, out)
    text = text.replace(paced_plan().digest(), "sha256:<digest of the plan>")
    assert text == (GOLDEN / "local.txt").read_text()
    assert not out.exists()


def test_case_44_the_dry_run_maps_ranks_by_the_identity_of_devices() -> None:
    blocks = 10
    plan = changed(
        paced_plan(),
        pipelines=(
            make_pipeline(devices=("b:1", "a:1"), cuts=(4,), num_blocks=blocks, micro_batches=2),
            make_pipeline(devices=("a:0",), num_blocks=blocks, micro_batches=3),
        ),
    )
    lines = [line for line in dry_run(plan, OPTIONS, "/runs/x").splitlines() if "# rank" in line]
    assert [line.split(", log")[0] for line in lines] == [
        "# rank 0: b:1, pipeline 0, stage 0, blocks [0, 4)",
        "# rank 1: a:0, pipeline 1, stage 0, blocks [0, 10)",
        "# rank 2: a:1, pipeline 0, stage 1, blocks [4, 10)",
    ]


def test_a_plan_that_was_written_and_read_runs_the_same(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", paced_plan())
    again = read_plan(tmp_path / "plan.json")
    assert dry_run(again, OPTIONS, "/runs/x") == dry_run(paced_plan(), OPTIONS, "/runs/x")
    assert make_plan().digest() != again.digest()
