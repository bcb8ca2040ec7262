"""Runs a plan: check everything, prepare the folder, start the workers, watch, tell how it ended.

`run_plan` is what ``eth run`` calls, and a notebook may call it as well. What is decided about a
running job is decided in `launch.supervise`; this module only feeds it and does what it says.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_cli.errors import LaunchError
from eth_cli.launch import precision, preflight, supervise
from eth_cli.launch.backends.base import Backend
from eth_cli.launch.backends.registry import load_backend
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.folder import locked, prepare_folder
from eth_cli.launch.interrupts import Interrupts, RunStoppedError, counted, words
from eth_cli.launch.job import Job, make_job
from eth_cli.launch.paces import last_scalars, missed_paces
from eth_cli.launch.preflight import check_runnable
from eth_cli.launch.progress import MetricsTail, Progress, Speedometer, StepRecord
from eth_cli.launch.runtime.pacing import stage_pace
from eth_cli.launch.status import Status, read_status
from eth_cli.launch.utilisation import Gauge
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.schedule import Action, Op

__all__ = ["Progress", "RunResult", "check_runnable", "dry_run", "run_plan"]

_LOOK_S = 0.1
"""Time between two looks at the ranks [s]."""
_GRACE_S = 2.0
"""Time that ranks get to end by themselves after a failure [s]; then they are killed."""
_FULL_BYTES = 2**16
"""A disk with less space than this is full."""

OnProgress = Callable[[Progress], None]
OnNotice = Callable[[str], None]


def _ignore(_notice: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended that did not fail."""

    out: Path
    first_step: int
    """The step that it went on from; 0 for a new run."""
    steps: int
    """Optimizer steps done in all, those before a resume included."""
    loss: float | None
    """Of the last step; None when that step was skipped."""
    median_step_time_s: float | None
    """Of the steps of this call but the first [s]; None when there was no other."""
    tokens_per_s: float | None
    """Over the same steps."""
    wall_s: float
    """From start to end, starting of workers included [s]."""
    stopped: bool
    """Whether it was asked to end early, and did; a checkpoint was written then."""
    stopped_by: signal.Signals | None = None
    """The signal that asked for it; None when it was not a signal."""


def dry_run(plan: Plan, options: RunOptions, out: str | Path, *, backend: str = "local") -> str:
    """What `run_plan` would run, as text; checks all that `run_plan` checks and changes nothing.

    Raises:
        ConfigError: the run cannot be started like this.
    """
    chosen, job, start = _prepare(plan, options, RunFolder(Path(out).absolute()), backend)
    lines = [f"# {note}" for note in precision.notes(plan)]
    lines += [f"# warning: {warning}" for warning in start.warnings]
    lines += [f"# {job.num_ranks} ranks; plan {plan.digest()}", str(chosen.render(job))]
    for place in plan.ranks:
        blocks = plan.pipelines[place.pipeline].stages[place.stage].blocks
        lines.append(
            f"# rank {place.rank}: {place.device}, pipeline {place.pipeline}, "
            f"stage {place.stage}, blocks [{blocks[0]}, {blocks[1]}), "
            f"log {job.folder.log_of(place.rank)}"
        )
    return "\n".join(lines) + "\n"


def run_plan(
    plan: Plan,
    options: RunOptions,
    out: str | Path,
    *,
    backend: str = "local",
    on_progress: OnProgress | None = None,
    on_notice: OnNotice = _ignore,
    profile: Profile | None = None,
) -> RunResult:
    """Train by a plan, in the folder ``out``, until ``options.steps`` steps are done.

    The first Ctrl-C (or SIGTERM, SIGHUP) ends the run after the present step with a checkpoint, a
    second one kills it. ``on_progress`` is called after each step, ``on_notice`` with a line that a
    person should read. ``profile`` is kept in the folder, so that a report can tell what was
    predicted.

    Raises:
        ConfigError: something is wrong that can be known before a worker is started.
        LaunchError: a rank failed, hung or did not start; nothing runs any more then.
        RunStoppedError: a second interrupt ended it.
    """
    folder = RunFolder(Path(out).absolute())
    chosen, job, start = _prepare(plan, options, folder, backend)
    request = chosen.render(job)
    for notice in (*precision.notes(plan), *start.warnings):
        on_notice(notice)
    with locked(folder), counted() as interrupts:
        prepare_folder(folder, plan, options, profile=profile, first_step=start.step)
        return Execution(
            plan=plan,
            options=options,
            job=job,
            backend=chosen,
            first_step=start.step,
            on_progress=on_progress,
            on_notice=on_notice,
        ).run(request, interrupts)


def _prepare(
    plan: Plan, options: RunOptions, folder: RunFolder, backend: str
) -> tuple[Backend, Job, preflight.Start]:
    chosen = load_backend(backend)
    spec = check_runnable(plan)
    job = make_job(plan, folder)
    chosen.render(job)  # a backend that cannot run this job says so here
    source = preflight.check_data(options, plan, spec)
    start = preflight.check_folder(folder, plan, spec, options, source)
    return chosen, job, start


def _predictor(plan: Plan) -> Callable[[Status], float]:
    """How long the plan predicts that an operation takes at most [s]; 0 where it predicts none."""
    step_s = 0.0 if plan.predicted is None else plan.predicted.step_time_s
    paces = [stage_pace(plan, pipeline=p.pipeline, stage=p.stage) for p in plan.ranks]

    def predicted_s(status: Status) -> float:
        pace = paces[status.rank]
        try:
            op = Action.from_str(status.operation).op
        except ValueError:
            return step_s
        if pace is None or not op.is_compute:
            return step_s
        return sum(pace.forward_s if op is Op.FORWARD else pace.backward_s)

    return predicted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """One run, from the start of its workers to their end.

    Apart from `run_plan` so that any job can be run like this, not only that of the real worker.
    """

    plan: Plan
    options: RunOptions
    job: Job
    backend: Backend
    first_step: int
    on_progress: OnProgress | None
    on_notice: OnNotice = _ignore

    def run(self, request: Any, interrupts: Interrupts) -> RunResult:
        """Submit a request and watch it until it ends, by itself or because it was interrupted.

        Raises:
            LaunchError: naming who failed first, and where.
            RunStoppedError: interrupted again while it was stopping.
        """
        start_s = time.monotonic()
        handle = self.backend.submit(request)
        records: list[StepRecord] = []
        try:
            stopped = self._watch(handle, interrupts, records)
        finally:
            self.backend.cancel(handle, grace_s=_GRACE_S)
        self._tell_missed_paces()
        steady = records[1:]
        total_s = sum(r.step_time_s for r in steady)
        shutil.rmtree(self.job.folder.status, ignore_errors=True)
        self.job.folder.stop.unlink(missing_ok=True)
        return RunResult(
            out=self.job.folder.root,
            first_step=self.first_step,
            steps=records[-1].step if records else self.first_step,
            loss=records[-1].loss if records else None,
            median_step_time_s=statistics.median(r.step_time_s for r in steady) if steady else None,
            tokens_per_s=sum(r.tokens for r in steady) / total_s if total_s > 0 else None,
            wall_s=time.monotonic() - start_s,
            stopped=stopped,
            stopped_by=interrupts.first if stopped else None,
        )

    def _tell_missed_paces(self) -> None:
        folder, places = self.job.folder, self.job.places
        scalars = [
            scalar
            for place in places
            for scalar in last_scalars(folder.events_of(place.rank), after_step=self.first_step)
        ]
        if note := missed_paces(scalars):
            self.on_notice(note)

    def _watch(self, handle: Any, interrupts: Interrupts, records: list[StepRecord]) -> bool:
        """Watch until the end. Returns whether the workers stopped because they were asked to."""
        folder = self.job.folder
        limits = supervise.Limits(
            start_s=self.options.start_timeout_s,
            hang_s=self.options.hang_timeout_s,
            predicted_s=_predictor(self.plan),
        )
        state = supervise.initial(self.job.num_ranks, limits)
        metrics = MetricsTail(folder.metrics, after_step=self.first_step)
        speed = Speedometer(steps=self.options.steps)
        gauge = Gauge(self.plan)
        while True:
            for _ in range(interrupts.count - state.num_interrupts):
                state, actions = supervise.advance(state, supervise.Interrupted())
                self._heed(actions, interrupts.first or signal.SIGINT)
            if not folder.options.exists():
                raise LaunchError(
                    f"the run failed: its folder {folder.root} was removed or moved while it went "
                    "on, and its logs with it"
                )
            # The statuses first: what ends in between is then seen as ended next time.
            statuses = {
                rank: status
                for rank in range(self.job.num_ranks)
                if (status := read_status(folder.status_of(rank))) is not None
            }
            state, actions = supervise.advance(
                state,
                supervise.Observed(
                    time_s=time.monotonic(), statuses=statuses, job=self.backend.status(handle)
                ),
            )
            for record in metrics.read():
                records.append(record)
                if self.on_progress is not None:
                    used = gauge.read(statuses, step_time_s=record.step_time_s)
                    self.on_progress(speed.progress(record, used))
            step = records[-1].step if records else self.first_step
            if self._act(actions, step):
                return any(
                    r.status is not None and r.status.state == "stopped" for r in state.ranks
                )
            time.sleep(_LOOK_S)

    def _heed(self, actions: tuple[supervise.Action, ...], number: signal.Signals) -> None:
        """Do what the supervisor says to an interrupt."""
        for action in actions:
            match action:
                case supervise.RequestStop():
                    try:
                        self.job.folder.stop.touch()
                    except OSError as error:
                        raise LaunchError(
                            f"the workers cannot be asked to stop, so they were ended: "
                            f"{self.job.folder.stop}: {error.strerror}"
                        ) from None
                    self.on_notice(
                        f"{words(number)}: stopping after the step in progress, with a checkpoint; "
                        "once more ends the run at once"
                    )
                case supervise.Abort():
                    raise RunStoppedError(
                        "ended by a second interrupt; what came after the last checkpoint is lost",
                        by=number,
                    )

    def _act(self, actions: tuple[supervise.Action, ...], step: int) -> bool:
        """Do what the supervisor says, after ``step`` steps. Returns whether the run is over."""
        for action in actions:
            match action:
                case supervise.Finish(by_itself=by_itself):
                    if not by_itself:
                        self._check_saved(step)
                    return True
                case supervise.Failure():
                    raise self._error(action)
        return False

    def _check_saved(self, step: int) -> None:
        """Of a job that does not end though its ranks are done: whether all its work is on disk."""
        folder = self.job.folder
        if not folder.marker_of(step).is_file():
            log = folder.logs / "launcher.log"
            raise LaunchError(
                "the run failed: all ranks are done, but torchrun did not end within "
                f"{supervise.END_S:g} s, and {folder.checkpoint_of(step)} is not complete; "
                f"see {log}",
                log_path=str(log),
            )

    def _error(self, failure: supervise.Failure) -> LaunchError:
        folder = self.job.folder
        if failure.rank is None:
            log = folder.logs / "launcher.log"
            return LaunchError(
                f"the run failed: {failure.cause}{_disk_note(folder)}; see {log}", log_path=str(log)
            )
        place = self.job.places[failure.rank]
        log = folder.log_of(failure.rank)
        when = "before it said what it does"
        if failure.step is not None:
            doing = f"during {failure.operation}"
            when = f"in step {failure.step}, {doing}" if failure.step else f"at start-up, {doing}"
        return LaunchError(
            f"rank {failure.rank} ({place.device}, pipeline {place.pipeline}, "
            f"stage {place.stage}) {failure.cause}; {when}{_disk_note(folder)}; its log is {log}",
            rank=failure.rank,
            device=place.device,
            pipeline=place.pipeline,
            stage=place.stage,
            step=failure.step,
            operation=failure.operation,
            log_path=str(log),
        )


def _disk_note(folder: RunFolder) -> str:
    """That the disk is full, where it is: ranks that fail of it may be unable to say so."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder.root).free
        if free < _FULL_BYTES:
            return f"; no space is left on the disk of {folder.root}"
    return ""
