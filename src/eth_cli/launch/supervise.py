"""Watches a run: what to do when ranks die, hang or do not start, or when a person interrupts.

A pure state machine: `advance` takes a state and an event and gives the next state and what to do
about it. It has no clock, no files and no processes, so tests replay any order of events at once;
`launch.run` feeds it. Which of several failures came first is `launch.blame`'s question.

Time is counted only while someone looks: between two observations at most `MAX_GAP_S` seconds
pass. A launcher that was itself suspended does not take its own sleep for the workers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from eth_cli.launch.backends.base import JobView, ProcessView
from eth_cli.launch.blame import NEVER, RankEnd, cause_of, first_failure, how, is_tired_of_waiting
from eth_cli.launch.status import Status
from eth_cli.torchrun import RankExit

MAX_GAP_S = 2.0
"""Longest time that may pass between two observations [s]."""
REPORT_S = 3.0
"""Time that torchrun gets to tell how a rank died, from when it was seen dead [s]."""
END_S = 10.0
"""Time that the job gets to end once all its ranks have said that they are done [s]."""
COMPUTING = 0.2
"""A process that uses more of a core than this computes; less is the noise of waiting threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long what may take."""

    start_s: float
    """Until every rank trains; also for one operation of a rank that computes or saves [s]."""
    hang_s: float
    """Without progress, beyond what is predicted [s]."""
    predicted_s: Callable[[Status], float]
    """Longest time that the plan predicts for a status's operation [s]; 0 where it does not."""


_ENDED_WELL = ("done", "stopped")
"""States of a rank that has ended as it should."""


# --- Events and actions ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What the ranks do at one moment, and what is known of the job."""

    time_s: float
    """A monotonic clock [s]."""
    statuses: Mapping[int, Status]
    """Of the ranks that have one."""
    job: JobView


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A person asked to stop (Ctrl-C), or the system did (SIGTERM, SIGHUP)."""


Event: TypeAlias = Observed | Interrupted


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStop:
    """Ask the workers to save a checkpoint after the present step and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Who interrupted does not want to wait: end the workers at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """All ranks have ended well."""

    by_itself: bool = True
    """Whether the job has ended, too; if not, it hangs with nothing left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The run has failed: stop what is left of it and say why."""

    cause: str
    """What happened, as the end of a sentence that starts with the rank."""
    rank: int | None = None
    """The rank that is to blame; None when it is none of them."""
    step: int | None = None
    operation: str | None = None


Action: TypeAlias = RequestStop | Abort | Finish | Failure


# --- State ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What is known of one rank."""

    status: Status | None = None
    """The last one seen."""
    gone: bool = False
    """Whether it had a status that is no more: it has ended well."""
    since_s: float = 0.0
    """Watched time when its present status was first seen [s]."""
    cpu_since_s: float = 0.0
    """Processor time that it had used then [s]."""
    cpu_s: float = 0.0
    """Processor time used so far [s]."""
    stopped_since_s: float | None = None
    """Watched time since when its process is stopped [s]."""
    dead_since_s: float | None = None
    """Watched time since when its process is no more, though its work is not done [s]."""

    @property
    def says_done(self) -> bool:
        """Whether it has said that it has nothing more to do."""
        return self.status is not None and self.status.state in _ENDED_WELL

    @property
    def is_done(self) -> bool:
        """Whether it has nothing more to do."""
        return self.gone or self.says_done

    @property
    def is_started(self) -> bool:
        """Whether it got to train."""
        return self.is_done or (self.status is not None and self.status.state != "starting")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that `advance` remembers."""

    limits: Limits
    ranks: tuple[RankState, ...]
    watched_s: float = 0.0
    """Time spent watching [s]; all other times count by it."""
    last_s: float | None = None
    """The clock at the last observation [s]."""
    done_since_s: float | None = None
    """Watched time since when all ranks have said that they are done [s]."""
    num_interrupts: int = 0
    over: bool = False
    """Whether the verdict has been given."""


def initial(num_ranks: int, limits: Limits) -> State:
    """The state before anything has been seen."""
    return State(limits=limits, ranks=(RankState(),) * num_ranks)


def advance(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The next state, and what to do. After a `Finish` or `Failure` nothing more is done."""
    if state.over:
        return state, ()
    if isinstance(event, Interrupted):
        return _interrupted(state)
    state = _noted(state, event)
    verdict = _verdict(state, event.job)
    if verdict is None:
        return state, ()
    return replace(state, over=True), (verdict,)


def _interrupted(state: State) -> tuple[State, tuple[Action, ...]]:
    state = replace(state, num_interrupts=state.num_interrupts + 1)
    if state.num_interrupts == 1:
        return state, (RequestStop(),)
    return replace(state, over=True), (Abort(),)


def _noted(state: State, event: Observed) -> State:
    gap = 0.0 if state.last_s is None else event.time_s - state.last_s
    now = state.watched_s + min(max(gap, 0.0), MAX_GAP_S)
    ranks = tuple(
        _noted_rank(old, event.statuses.get(rank), event.job.processes.get(rank), now)
        for rank, old in enumerate(state.ranks)
    )
    all_done = all(seen.says_done for seen in ranks)
    return replace(
        state,
        ranks=ranks,
        watched_s=now,
        last_s=event.time_s,
        done_since_s=_since(state.done_since_s, all_done, now),
    )


def _noted_rank(
    old: RankState, status: Status | None, process: ProcessView | None, now: float
) -> RankState:
    new = old
    if process is not None and process.alive:
        new = replace(new, cpu_s=process.cpu_s)
    if status is not None and status != old.status:
        new = replace(new, status=status, gone=False, since_s=now, cpu_since_s=new.cpu_s)
    elif status is None and old.status is not None:
        new = replace(new, gone=True)
    stopped = process is not None and process.alive and process.stopped
    dead = process is not None and not process.alive and not new.is_done
    return replace(
        new,
        stopped_since_s=_since(old.stopped_since_s, stopped, now),
        dead_since_s=_since(old.dead_since_s, dead, now),
    )


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return (now if before is None else before) if holds else None


# --- Verdicts -------------------------------------------------------------------------------------


def _verdict(state: State, job: JobView) -> Finish | Failure | None:
    if job.code == 0:
        return _asked_to_stop(state) or Finish()
    if job.code is not None and state.num_interrupts and state.done_since_s is not None:
        # torchrun got the same signal; its ranks have done what was asked.
        return Finish()
    if job.code is not None:
        return _first_failure(state, job.exits) or Failure(
            cause=f"torchrun ended {how(job.code)}, and no rank says why"
        )
    if any(_elapsed(state, _failed_since(seen)) > REPORT_S for seen in state.ranks):
        # torchrun is slow to tell, for one because it waits for ranks that do not end.
        return _first_failure(state, job.exits)
    if _elapsed(state, state.done_since_s) > END_S:
        return Finish(by_itself=False)
    return _stopped(state) or _not_started(state) or _hung(state)


def _asked_to_stop(state: State) -> Failure | None:
    """The rank that somebody else asked to stop, and that all others stopped with."""
    if state.num_interrupts:
        return None
    for rank, seen in enumerate(state.ranks):
        if seen.status is not None and seen.status.state == "stopped" and seen.status.error:
            cause = (
                f"{seen.status.error}, and all ranks stopped with it after the step in progress, "
                "with a checkpoint; go on with --resume"
            )
            return _blame(state, rank, cause)
    return None


def _elapsed(state: State, since_s: float | None) -> float:
    return 0.0 if since_s is None else state.watched_s - since_s


def _has_failed(seen: RankState) -> bool:
    return seen.status is not None and seen.status.state == "failed"


def _failed_since(seen: RankState) -> float | None:
    return seen.since_s if _has_failed(seen) else seen.dead_since_s


def _first_failure(state: State, exits: tuple[RankExit, ...]) -> Failure | None:
    reported = {exit_.rank: exit_ for exit_ in exits}
    ends = [
        end
        for rank, seen in enumerate(state.ranks)
        if (end := _end_of(rank, seen, reported.get(rank))) is not None
    ]
    first = first_failure(ends)
    if first is None:
        return None
    if is_tired_of_waiting(first.error) and (awaited := _awaited(state)) is not None:
        return _blame(state, awaited, "has hung: others gave up waiting for it")
    return _blame(state, first.rank, cause_of(first))


def _awaited(state: State) -> int | None:
    """The rank that the others most likely wait for: a stopped one, or the longest at work."""
    at_work = [
        rank
        for rank, seen in enumerate(state.ranks)
        if seen.stopped_since_s is not None
        or not (seen.is_done or _waits(seen) or _has_failed(seen))
    ]
    return min(
        at_work,
        key=lambda rank: (state.ranks[rank].stopped_since_s is None, state.ranks[rank].since_s),
        default=None,
    )


def _end_of(rank: int, seen: RankState, exit_: RankExit | None) -> RankEnd | None:
    """What is known of a rank's end; None while there is no sign of one."""
    error, error_s = "", None
    if exit_ is not None:
        error, error_s = exit_.error, exit_.time_s
    if seen.status is not None and _has_failed(seen):
        error = seen.status.error or error or "for a reason it does not tell"
        error_s = seen.status.time_s
    if exit_ is None and not error and seen.dead_since_s is None:
        return None
    return RankEnd(
        rank=rank,
        error=error,
        error_s=NEVER if error_s is None else error_s,
        code=None if exit_ is None else exit_.code,
        dead_s=NEVER if seen.dead_since_s is None else seen.dead_since_s,
    )


def _blame(state: State, rank: int, cause: str) -> Failure:
    status = state.ranks[rank].status
    return Failure(
        cause=cause,
        rank=rank,
        step=None if status is None else status.step,
        operation=None if status is None else status.operation,
    )


def _stopped(state: State) -> Failure | None:
    for rank, seen in enumerate(state.ranks):
        if _elapsed(state, seen.stopped_since_s) > state.limits.hang_s:
            return _blame(
                state,
                rank,
                f"has hung: its process has been stopped (SIGSTOP) for {state.limits.hang_s:g} s",
            )
    return None


def _not_started(state: State) -> Failure | None:
    late = [rank for rank, seen in enumerate(state.ranks) if not seen.is_started]
    if not late or state.watched_s <= state.limits.start_s:
        return None
    # Those who wait for the others to start are not the cause.
    rank = next((r for r in late if not _waits(state.ranks[r])), late[0])
    return _blame(state, rank, f"did not start within {state.limits.start_s:g} s")


def _waits(seen: RankState) -> bool:
    return seen.status is not None and seen.status.waits


def _hung(state: State) -> Failure | None:
    """The rank that holds up the run, if any has shown no progress for too long.

    That is one whose own work takes too long. Ranks that wait for others are not to blame; but
    when all of them wait, for each other, the one that is furthest behind is named.
    """
    working = [
        rank for rank, seen in enumerate(state.ranks) if seen.is_started and not seen.is_done
    ]
    too_long = [rank for rank in working if _is_too_long(state, rank)]
    for rank in too_long:
        if not _waits(state.ranks[rank]):
            quiet_s = _elapsed(state, state.ranks[rank].since_s)
            return _blame(state, rank, f"has hung: no progress for {quiet_s:.0f} s")
    all_started = all(seen.is_started for seen in state.ranks)
    if working and all_started and len(too_long) == len(working):
        last = min(working, key=lambda rank: (_progress(state.ranks[rank]), rank))
        quiet_s = min(_elapsed(state, state.ranks[rank].since_s) for rank in working)
        return _blame(
            state,
            last,
            f"is furthest behind, and all ranks have waited for each other for {quiet_s:.0f} s",
        )
    return None


def _progress(seen: RankState) -> tuple[int, float]:
    return (0, 0.0) if seen.status is None else (seen.status.step, seen.since_s)


def _is_too_long(state: State, rank: int) -> bool:
    seen, limits = state.ranks[rank], state.limits
    assert seen.status is not None  # only started ranks are asked about
    elapsed = _elapsed(state, seen.since_s)
    allowed = limits.hang_s + limits.predicted_s(seen.status)
    computes = elapsed > 0 and (seen.cpu_s - seen.cpu_since_s) / elapsed > COMPUTING
    if computes or seen.status.state == "saving":
        # Slower than predicted, but at work: a loaded machine, a plan without prediction, a disk.
        allowed = max(allowed, limits.start_s)
    return elapsed > allowed
