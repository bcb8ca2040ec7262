"""The supervisor, replayed with a fake clock: any order of events, and who is blamed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from eth_cli.launch.backends.base import JobView, ProcessView
from eth_cli.launch.status import Status
from eth_cli.launch.supervise import (
    END_S,
    MAX_GAP_S,
    REPORT_S,
    Abort,
    Action,
    Failure,
    Finish,
    Interrupted,
    Limits,
    Observed,
    RequestStop,
    State,
    advance,
    initial,
)
from eth_cli.torchrun import RankExit

HANG_S = 20.0
START_S = 90.0
PREDICTED_S = 7.0
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5033."


@dataclass
class Replay:
    """A run of three ranks, driven by hand."""

    num_ranks: int = 3
    time_s: float = 1000.0
    statuses: dict[int, Status] = field(default_factory=dict)
    processes: dict[int, ProcessView] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    verdict_s: float | None = None
    state: State = field(init=False)

    def __post_init__(self) -> None:
        limits = Limits(
            start_s=START_S,
            hang_s=HANG_S,
            predicted_s=lambda status: PREDICTED_S if status.operation == "0F0" else 0.0,
        )
        self.state = initial(self.num_ranks, limits)
        self.start_s = self.time_s

    def says(
        self,
        rank: int,
        operation: str = "0F1",
        *,
        state: str = "training",
        step: int = 4,
        waits: bool = False,
        error: str = "",
    ) -> None:
        self.statuses[rank] = Status(
            rank=rank,
            pid=100 + rank,
            state=state,
            step=step,
            operation=operation,
            waits=waits,
            time_s=self.time_s,
            error=error,
        )

    def process(self, rank: int, **view: float) -> None:
        old = self.processes.get(rank, ProcessView(alive=True))
        self.processes[rank] = ProcessView(
            alive=bool(view.get("alive", old.alive)),
            stopped=bool(view.get("stopped", old.stopped)),
            cpu_s=view.get("cpu_s", old.cpu_s),
        )

    def all_train(self) -> None:
        for rank in range(self.num_ranks):
            self.process(rank, alive=True)
            self.says(rank)

    def look(self, *, code: int | None = None, exits: tuple[RankExit, ...] = ()) -> Replay:
        event = Observed(
            time_s=self.time_s,
            statuses=dict(self.statuses),
            job=JobView(code=code, exits=exits, processes=dict(self.processes)),
        )
        self._advance(event)
        return self

    def interrupt(self) -> None:
        self._advance(Interrupted())

    def _advance(self, event: Observed | Interrupted) -> None:
        self.state, actions = advance(self.state, event)
        self.actions += actions
        if self.verdict_s is None and any(not isinstance(a, RequestStop) for a in actions):
            self.verdict_s = self.time_s

    def watch(self, seconds: float, *, cpu_share: Mapping[int, float] | None = None) -> None:
        """Look twice a second for a while, nothing new happening."""
        for _ in range(round(seconds * 2)):
            self.time_s += 0.5
            for rank, share in (cpu_share or {}).items():
                self.process(rank, cpu_s=self.processes[rank].cpu_s + share * 0.5)
            self.look()

    @property
    def failure(self) -> Failure:
        """The verdict, which is a failure, given once."""
        verdicts = [a for a in self.actions if not isinstance(a, RequestStop)]
        assert len(verdicts) == 1, verdicts
        assert isinstance(verdicts[0], Failure)
        return verdicts[0]


@pytest.fixture
def run() -> Replay:
    """Three ranks in step 4."""
    replay = Replay()
    replay.all_train()
    replay.look()
    return replay


def exit_of(rank: int, code: int, error: str = "", time_s: float | None = None) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, code=code, error=error, time_s=time_s)


# --- Ends -----------------------------------------------------------------------------------------


def test_a_run_that_ends_well_is_finished_once(run: Replay) -> None:
    for rank in range(3):
        run.says(rank, state="done")
        run.process(rank, alive=False)
    run.watch(REPORT_S + 2)
    assert run.actions == []  # torchrun decides when it is over
    run.look(code=0).look(code=0)
    assert run.actions == [Finish()]


def test_a_job_that_does_not_end_when_all_ranks_are_done_is_ended(run: Replay) -> None:
    for rank in range(3):
        run.says(rank, state="done")
        run.process(rank, alive=False)
    run.watch(END_S)
    assert run.actions == []
    run.watch(2)
    assert run.actions == [Finish(by_itself=False)]


def test_a_job_does_not_end_before_the_last_rank_is_done(run: Replay) -> None:
    run.says(0, state="done")
    run.says(1, state="done")
    run.watch(END_S + 2)
    assert run.actions == []


def test_case_48_a_killed_rank_is_named_though_others_failed_after_it(run: Replay) -> None:
    run.says(0, "0B1", state="failed", error=LOST)
    run.says(1, "1F3", step=4)
    run.look(
        code=1,
        exits=(
            exit_of(0, 1, LOST, 7.1),
            exit_of(1, -signal.SIGKILL),
            exit_of(2, -signal.SIGTERM, LOST, 7.0),
        ),
    )
    assert run.failure.rank == 1
    assert (run.failure.step, run.failure.operation) == (4, "1F3")
    assert "SIGKILL" in run.failure.cause


def test_case_48_a_rank_that_is_gone_is_a_failure_even_while_torchrun_says_nothing(
    run: Replay,
) -> None:
    run.process(2, alive=False)
    run.watch(REPORT_S + 1)
    assert run.failure.rank == 2
    assert run.failure.cause == "died"


def test_the_first_of_two_own_errors_is_named(run: Replay) -> None:
    exits = (exit_of(0, 1, "KeyError: 'b'", 8.2), exit_of(2, 1, "ValueError: a", 8.1))
    run.look(code=1, exits=exits)
    assert run.failure.rank == 2
    assert run.failure.cause == "failed: ValueError: a"


def test_an_own_error_is_named_before_an_earlier_lost_connection(run: Replay) -> None:
    # Clocks of processes on one machine agree, but a record may be written late.
    run.look(code=1, exits=(exit_of(0, 1, LOST, 8.0), exit_of(1, 1, "ValueError: a", 8.3)))
    assert run.failure.rank == 1


def test_a_silent_exit_is_named_before_lost_connections(run: Replay) -> None:
    run.look(code=1, exits=(exit_of(0, 1, LOST, 8.0), exit_of(2, 3)))
    assert run.failure.rank == 2
    assert run.failure.cause == "ended with exit code 3"


def test_an_abort_over_a_lost_connection_is_not_the_cause(run: Replay) -> None:
    exits = (exit_of(0, -signal.SIGABRT), exit_of(1, 1, "ValueError: a", 8.0))
    run.look(code=1, exits=exits)
    assert run.failure.rank == 1


def test_a_crash_is_named_before_sigterm(run: Replay) -> None:
    run.look(code=1, exits=(exit_of(0, -signal.SIGTERM), exit_of(1, -signal.SIGSEGV)))
    assert run.failure.rank == 1
    assert run.failure.cause == "was killed by SIGSEGV"


def test_when_only_sigterm_is_reported_the_first_dead_rank_is_named(run: Replay) -> None:
    run.process(2, alive=False)
    run.watch(0.5)
    run.process(0, alive=False)
    run.watch(0.5)
    run.look(code=1, exits=(exit_of(0, -signal.SIGTERM), exit_of(2, -signal.SIGTERM)))
    assert run.failure.rank == 2


def test_only_lost_connections_name_the_earliest(run: Replay) -> None:
    run.look(code=1, exits=(exit_of(0, 1, LOST, 8.2), exit_of(1, 1, LOST, 8.1)))
    assert run.failure.rank == 1


def test_what_the_status_tells_is_more_than_an_exit_code(run: Replay) -> None:
    run.says(1, "CHECKPOINT", state="failed", error="OSError: No space left on device")
    run.look(code=1, exits=(exit_of(1, 1), exit_of(0, -signal.SIGTERM)))
    assert run.failure.rank == 1
    assert "No space left" in run.failure.cause
    assert run.failure.operation == "CHECKPOINT"


def test_a_torchrun_that_fails_by_itself_is_no_rank_s_fault(run: Replay) -> None:
    run.look(code=-signal.SIGKILL)
    assert run.failure.rank is None
    assert "torchrun ended killed by SIGKILL" in run.failure.cause


def test_a_signal_without_a_name_is_still_told(run: Replay) -> None:
    run.look(code=1, exits=(exit_of(1, -250),))
    assert run.failure.cause == "was killed by signal 250"


def test_a_rank_that_failed_but_does_not_end_is_not_waited_for(run: Replay) -> None:
    run.says(1, state="failed", error="ValueError: a")
    run.watch(REPORT_S)
    assert run.actions == []
    run.watch(1)
    assert run.failure.rank == 1
    assert run.failure.cause == "failed: ValueError: a"


def test_a_dead_rank_is_named_before_the_lost_connections_when_torchrun_is_slow(
    run: Replay,
) -> None:
    run.process(0, alive=False)
    run.says(1, state="failed", error=LOST)
    run.says(2, state="failed", error=LOST)
    run.watch(REPORT_S + 1)
    assert run.failure.rank == 0


def test_a_rank_that_ends_between_two_looks_is_not_taken_for_dead(run: Replay) -> None:
    run.process(1, alive=False)  # seen gone, its last words not read yet
    run.look()
    run.says(1, state="done")
    run.watch(REPORT_S + 5)
    assert run.actions == []


def test_a_status_that_was_removed_means_that_the_rank_ended_well(run: Replay) -> None:
    del run.statuses[2]
    run.process(2, alive=False)
    run.watch(REPORT_S + 5)
    assert run.actions == []


def test_nothing_is_done_after_the_verdict(run: Replay) -> None:
    run.look(code=1, exits=(exit_of(1, 3),))
    run.interrupt()
    run.watch(100)
    run.look(code=0)
    assert run.failure.rank == 1
    assert len(run.actions) == 1


# --- Hangs ----------------------------------------------------------------------------------------


def test_a_stopped_process_is_the_culprit_whatever_the_others_say(run: Replay) -> None:
    run.says(0, "AGREE", waits=True)
    run.says(1, "AGREE", waits=True)
    run.says(2, "AGREE", waits=True)
    run.process(2, stopped=True)
    run.watch(HANG_S)
    assert run.actions == []
    run.watch(2)
    assert run.failure.rank == 2
    assert "SIGSTOP" in run.failure.cause
    assert run.verdict_s is not None
    assert run.verdict_s - run.start_s < 25


def test_a_process_that_is_continued_in_time_is_forgiven(run: Replay) -> None:
    for _ in range(3):
        run.process(2, stopped=True)
        run.says(2)
        run.watch(HANG_S - 2)
        run.process(2, stopped=False)
        run.all_train()
        run.watch(1)
    assert run.actions == []


def test_a_rank_that_works_too_long_is_the_culprit_not_those_that_wait_for_it(run: Replay) -> None:
    run.says(0, "AGREE", waits=True)
    run.says(2, "AGREE", waits=True)
    run.says(1, "1F2")
    run.watch(HANG_S + 1)
    assert run.failure.rank == 1
    assert run.failure.operation == "1F2"
    assert "no progress" in run.failure.cause


def test_what_is_predicted_is_granted_on_top(run: Replay) -> None:
    for rank in range(3):
        run.says(rank, "0F0")
    run.watch(HANG_S + PREDICTED_S)
    assert run.actions == []
    run.watch(1)
    assert run.failure.rank == 0


def test_one_that_waits_is_not_to_blame_while_another_is_within_its_time(run: Replay) -> None:
    run.says(0, "1RECV_F0", waits=True)
    run.says(1, "0F0")
    run.says(2, "AGREE", waits=True)
    run.watch(HANG_S + PREDICTED_S)
    assert run.actions == []


def test_when_all_wait_the_one_furthest_behind_is_named(run: Replay) -> None:
    run.says(0, "AGREE", waits=True, step=5)
    run.says(1, "SYNC", waits=True, step=4)
    run.says(2, "AGREE", waits=True, step=5)
    run.watch(HANG_S + 1)
    assert run.failure.rank == 1
    assert (run.failure.step, run.failure.operation) == (4, "SYNC")
    assert "waited for each other" in run.failure.cause


def test_ranks_that_wait_for_one_that_left_without_them_hang_too(run: Replay) -> None:
    run.says(0, state="done")
    run.says(1, "AGREE", waits=True)
    run.says(2, "AGREE", waits=True)
    run.watch(HANG_S + 1)
    assert run.failure.rank in (1, 2)


def test_progress_of_any_kind_starts_the_clock_again(run: Replay) -> None:
    for micro_batch in range(10):
        for rank in range(3):
            run.says(rank, f"{rank}B{micro_batch}")
        run.watch(HANG_S - 1)
    assert run.actions == []


def test_the_same_operation_in_the_next_step_is_progress(run: Replay) -> None:
    for step in range(5, 10):
        for rank in range(3):
            run.says(rank, "AGREE", step=step, waits=True)
        run.watch(HANG_S - 1)
    assert run.actions == []


def test_a_rank_that_visibly_computes_gets_more_time_but_not_for_ever(run: Replay) -> None:
    run.says(0, "AGREE", waits=True)
    run.says(1, "1F2")
    run.says(2, "AGREE", waits=True)
    run.watch(START_S - 1, cpu_share={1: 0.9})
    assert run.actions == []
    run.watch(3, cpu_share={1: 0.9})
    assert run.failure.rank == 1


def test_the_noise_of_waiting_threads_is_not_computing(run: Replay) -> None:
    run.says(1, "1F2")
    run.says(0, "AGREE", waits=True)
    run.says(2, "AGREE", waits=True)
    run.watch(HANG_S + 1, cpu_share={0: 0.05, 1: 0.05, 2: 0.05})
    assert run.failure.rank == 1


def test_processor_time_of_earlier_operations_does_not_count(run: Replay) -> None:
    run.watch(10, cpu_share={1: 1.0})
    run.says(0, "AGREE", waits=True)
    run.says(1, "1F2")
    run.says(2, "AGREE", waits=True)
    run.watch(HANG_S + 1, cpu_share={1: 0.0})
    assert run.failure.rank == 1


def test_the_launcher_s_own_sleep_is_not_the_workers_hang(run: Replay) -> None:
    run.time_s += 3600  # suspended, or Ctrl-Z
    run.look()
    assert run.actions == []
    run.watch(HANG_S - MAX_GAP_S - 1)
    assert run.actions == []


def test_a_clock_that_goes_backwards_does_no_harm(run: Replay) -> None:
    run.time_s -= 500
    run.look()
    run.watch(HANG_S + 1)
    assert run.failure.rank == 0


# --- Start-up -------------------------------------------------------------------------------------


def test_slow_starts_are_granted_until_the_deadline() -> None:
    run = Replay()
    run.process(0, alive=True)
    run.watch(START_S)
    assert run.actions == []
    run.watch(2)
    assert run.failure.rank == 0
    assert "did not start" in run.failure.cause
    assert run.failure.step is None


def test_a_rank_that_never_appears_is_named_before_those_that_wait_for_it() -> None:
    run = Replay()
    run.look()
    run.says(0, "connect", state="starting", step=0, waits=True)
    run.says(2, "connect", state="starting", step=0, waits=True)
    run.watch(START_S + 1)
    assert run.failure.rank == 1


def test_ranks_that_started_are_not_held_to_account_for_one_that_did_not() -> None:
    run = Replay()
    run.says(0, "AGREE", waits=True)
    run.says(1, "build", state="starting", step=0)
    run.says(2, "AGREE", waits=True)
    run.watch(START_S - 1)
    assert run.actions == []
    run.watch(3)
    assert run.failure.rank == 1


def test_a_process_stopped_during_start_up_is_found_before_the_deadline() -> None:
    run = Replay()
    run.process(1, stopped=True)
    run.watch(HANG_S + 1)
    assert run.failure.rank == 1
    assert run.failure.operation is None


def test_a_death_during_start_up_is_told_at_once() -> None:
    run = Replay()
    run.look(code=1, exits=(exit_of(1, 1, "ImportError: no such thing", 4.0),))
    assert run.failure.rank == 1
    assert "ImportError" in run.failure.cause


# --- Interrupts -----------------------------------------------------------------------------------


def test_the_first_interrupt_asks_and_the_second_kills(run: Replay) -> None:
    run.interrupt()
    assert run.actions == [RequestStop()]
    run.watch(3)
    run.interrupt()
    assert run.actions == [RequestStop(), Abort()]


def test_after_an_interrupt_the_run_may_end_well(run: Replay) -> None:
    run.interrupt()
    for rank in range(3):
        run.says(rank, "CHECKPOINT", state="saving", waits=True)
    run.watch(2)
    for rank in range(3):
        run.says(rank, state="stopped")
        run.process(rank, alive=False)
    run.watch(REPORT_S + 1)
    run.look(code=0)
    assert run.actions == [RequestStop(), Finish()]


def test_after_an_interrupt_torchrun_may_have_got_the_same_signal(run: Replay) -> None:
    run.interrupt()
    for rank in range(3):
        run.says(rank, state="stopped", error="was asked to stop (SIGTERM)")
    run.look(code=143)
    assert run.actions == [RequestStop(), Finish()]


def test_a_rank_that_alone_was_asked_to_stop_is_named(run: Replay) -> None:
    for rank in range(3):
        error = "was asked to stop (SIGTERM)" if rank == 1 else ""
        run.says(rank, "end", state="stopped", error=error)
    run.look(code=0)
    assert (run.failure.rank, run.failure.step) == (1, 4)
    assert run.failure.cause.startswith("was asked to stop (SIGTERM), and all ranks stopped with")
    assert "go on with --resume" in run.failure.cause


def test_a_run_that_is_stopped_by_its_file_is_finished(run: Replay) -> None:
    for rank in range(3):
        run.says(rank, "end", state="stopped")
    run.look(code=0)
    assert run.actions == [Finish()]


def test_a_hang_while_stopping_is_still_found(run: Replay) -> None:
    run.interrupt()
    run.says(0, "CHECKPOINT", state="saving", waits=True)
    run.says(1, "1B2")
    run.says(2, "CHECKPOINT", state="saving", waits=True)
    run.watch(HANG_S + 1)
    assert run.failure.rank == 1


# --- Others give up first -------------------------------------------------------------------------

GAVE_UP = "RuntimeError: [unbound_buffer.cc:84] Timed out waiting 20000ms for recv operation"


def test_a_stopped_rank_is_named_when_the_others_gave_up_waiting_for_it(run: Replay) -> None:
    run.says(2, "AGREE", waits=True)
    run.process(2, stopped=True)
    run.watch(1)
    run.says(0, "AGREE", state="failed", error=GAVE_UP)
    run.says(1, "AGREE", state="failed", error=GAVE_UP)
    run.watch(REPORT_S + 1)
    assert run.failure.rank == 2
    assert "gave up waiting" in run.failure.cause


def test_the_rank_at_work_is_named_when_the_others_gave_up_waiting_for_it(run: Replay) -> None:
    run.says(1, "1F2")
    run.watch(1)
    run.says(0, "AGREE", state="failed", error=GAVE_UP)
    run.says(2, "AGREE", waits=True)
    exits = (exit_of(0, 1), exit_of(1, -signal.SIGTERM), exit_of(2, -signal.SIGTERM))
    run.look(code=1, exits=exits)
    assert run.failure.rank == 1
    assert run.failure.operation == "1F2"


def test_when_all_gave_up_waiting_the_first_to_do_so_is_named(run: Replay) -> None:
    for rank in (2, 0, 1):
        run.time_s += 0.1
        run.says(rank, "AGREE", state="failed", error=GAVE_UP)
    run.watch(REPORT_S + 1)
    assert run.failure.rank == 2


def test_the_signal_is_told_even_while_torchrun_waits_for_the_others(run: Replay) -> None:
    run.process(1, alive=False)
    for _ in range(10):
        run.time_s += 0.5
        run.look(exits=(exit_of(1, -signal.SIGKILL),))
    assert run.failure.rank == 1
    assert "SIGKILL" in run.failure.cause


def test_a_slow_disk_is_not_a_hang_at_once(run: Replay) -> None:
    for rank in range(3):
        run.says(rank, "CHECKPOINT", state="saving", waits=True)
    run.watch(START_S - 1)
    assert run.actions == []
    run.watch(3)
    assert run.failure.operation == "CHECKPOINT"
