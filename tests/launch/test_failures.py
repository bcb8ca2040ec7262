"""How runs end that go wrong, with quick workers that do not train: who is named, what is left."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from launch.launching import paced_plan, processes_of

from eth_cli.errors import LaunchError
from eth_cli.events import Scalar, write_events
from eth_cli.launch import paces, supervise
from eth_cli.launch.backends.registry import load_backend
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.folder import prepare_folder
from eth_cli.launch.interrupts import Interrupts, RunStoppedError
from eth_cli.launch.job import make_job
from eth_cli.launch.run import Execution, RunResult

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


class Clocked(Interrupts):
    """Interrupts that have come by now, as a function tells."""

    def __init__(self, num_interrupts: Callable[[], int]) -> None:
        super().__init__()
        self._num_interrupts = num_interrupts

    @property
    def count(self) -> int:
        for _ in range(self._num_interrupts() - super().count):
            self.note(signal.SIGTERM)
        return super().count


@pytest.fixture
def run_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Run fake workers, each with its behaviour, and check that nothing of them is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    root = tmp_path / "a'; echo foo"  # whatever a folder may be called

    def run(
        behaviour: Mapping[int, str],
        *,
        hang_timeout_s: float = 20.0,
        num_interrupts: Callable[[], int] = lambda: 0,
        notices: list[str] | None = None,
    ) -> RunResult:
        monkeypatch.setenv("ETH_TEST_BEHAVIOUR", json.dumps(behaviour))
        plan = paced_plan()
        folder = RunFolder(root)
        options = RunOptions(steps=5, hang_timeout_s=hang_timeout_s)
        root.mkdir()
        prepare_folder(folder, plan, options, profile=None, first_step=0)
        backend = load_backend("local")
        job = make_job(plan, folder, module="fake_worker")
        execution = Execution(
            plan=plan,
            options=options,
            job=job,
            backend=backend,
            first_step=0,
            on_progress=None,
            on_notice=([] if notices is None else notices).append,
        )
        try:
            return execution.run(backend.render(job), Clocked(num_interrupts))
        finally:
            assert processes_of(root) == {}

    return run


def log_of(error: LaunchError) -> str:
    assert error.log_path is not None
    return Path(error.log_path).read_text()


def test_case_48_a_killed_rank_ends_the_run_though_another_does_not_react(
    run_fake: Callable[..., RunResult],
) -> None:
    before = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_fake({0: "lose", 1: "be killed", 2: "be deaf"})
    assert time.monotonic() - before < 30
    error = caught.value
    assert (error.exit_code, error.rank, error.device) == (4, 1, "a:0")
    assert (error.pipeline, error.stage, error.step, error.operation) == (1, 1, 3, "1F1")
    assert str(error) == (
        "rank 1 (a:0, pipeline 1, stage 1) was killed by SIGKILL (by hand, or by the system when "
        f"memory ran out); in step 3, during 1F1; its log is {error.log_path}"
    )
    assert log_of(error) == "rank 1 will be killed\n"


def test_a_rank_that_dies_while_it_is_imported_tells_why(
    run_fake: Callable[..., RunResult],
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_fake({2: "fail at import", 0: "lose"})
    error = caught.value
    assert (error.rank, error.device, error.step) == (2, "a:1", None)
    assert "failed: ImportError: no such thing" in str(error)
    assert "Traceback" in log_of(error)


def test_a_rank_that_raises_is_named_before_those_that_lose_it(
    run_fake: Callable[..., RunResult],
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_fake({0: "lose", 2: "raise"})
    assert caught.value.rank == 2
    assert "failed: ValueError: a fault of its own" in str(caught.value)


def test_a_rank_that_exits_without_a_word_is_named_with_its_code(
    run_fake: Callable[..., RunResult],
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_fake({0: "exit 3", 1: "lose"})
    assert caught.value.rank == 0
    assert "ended with exit code 3" in str(caught.value)


def test_a_rank_that_leaves_early_as_if_all_were_well_is_a_failure(
    run_fake: Callable[..., RunResult],
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_fake({1: "exit 0"})
    assert caught.value.rank == 1
    assert "died" in str(caught.value)


def test_ranks_that_all_wait_have_hung(run_fake: Callable[..., RunResult]) -> None:
    with pytest.raises(LaunchError) as caught:
        run_fake({}, hang_timeout_s=1.0)
    assert caught.value.operation == "AGREE"
    assert "waited for each other" in str(caught.value)


def test_the_first_interrupt_stops_well(run_fake: Callable[..., RunResult]) -> None:
    before = time.monotonic()
    notices: list[str] = []
    result = run_fake(
        {}, num_interrupts=lambda: int(time.monotonic() - before > 3), notices=notices
    )
    assert (result.stopped, result.stopped_by) == (True, signal.SIGTERM)
    (notice,) = notices
    assert notice.startswith("SIGTERM: stopping after the step in progress, with a checkpoint;")
    assert result.steps == 0


def test_missed_paces_are_told_at_the_end(
    run_fake: Callable[..., RunResult], tmp_path: Path
) -> None:
    events = tmp_path / "a'; echo foo" / "events" / "rank-1.jsonl"
    before = time.monotonic()

    def interrupt() -> int:
        if not events.exists():
            missed = [(paces.MISSED, 7), (paces.WORST, 0.0123)]
            write_events(events, [Scalar(rank=1, name=n, value=v, step=1) for n, v in missed])
        return int(time.monotonic() - before > 2)

    notices: list[str] = []
    run_fake({}, num_interrupts=interrupt, notices=notices)
    assert len(notices) == 2
    assert "rank 1 could not keep its pace 7 times, at worst by 12.3 ms" in notices[1]


def test_the_second_interrupt_kills(run_fake: Callable[..., RunResult]) -> None:
    before = time.monotonic()
    with pytest.raises(RunStoppedError, match="SIGTERM: ended by a second interrupt") as caught:
        run_fake(
            {2: "be deaf"}, num_interrupts=lambda: min(2, int((time.monotonic() - before) / 2))
        )
    assert caught.value.exit_code == 143


@pytest.mark.parametrize("is_saved", [True, False])
def test_torchrun_that_hangs_when_all_ranks_are_done_does_not_hold_up_the_run(
    run_fake: Callable[..., RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_saved: bool,
) -> None:
    monkeypatch.setattr(supervise, "END_S", 1.0)
    if is_saved:
        monkeypatch.setattr(RunFolder, "marker_of", lambda *_: Path(__file__))
        assert run_fake({1: "freeze torchrun"}).stopped
        return
    with pytest.raises(LaunchError, match=r"torchrun did not end within 1 s, and .*step-000000 is"):
        run_fake({1: "freeze torchrun"})


def test_a_run_whose_folder_vanishes_ends_and_says_so(
    run_fake: Callable[..., RunResult], tmp_path: Path
) -> None:
    root = tmp_path / "a'; echo foo"

    def remove() -> int:
        if (root / "status" / "rank-2").exists():
            shutil.rmtree(root)
        return 0

    with pytest.raises(LaunchError, match="was removed or moved while it went on") as caught:
        run_fake({}, num_interrupts=remove)
    assert str(root) in str(caught.value)


def test_a_full_disk_is_told_though_the_rank_could_not(
    run_fake: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(LaunchError, match="; no space is left on the disk of "):
        run_fake({0: "exit 3", 1: "lose"})
