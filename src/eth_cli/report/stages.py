"""Stages of a run: what each does with the step, and which one is the slowest."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from eth_cli.events import Span
from eth_cli.launch.runtime.pacing import stage_pace
from eth_cli.plan import Plan
from eth_cli.report.figures import Slowest, StageReport, StepShares
from eth_cli.report.measured import Where, lengths, work_of
from eth_cli.search.simulate import Simulation

PredictedTimes = tuple[float | None, float | None]
"""Forward and backward of one micro-batch [s]; None where nothing is predicted."""


def step_shares(spans: Sequence[Span], step_time_s: float) -> dict[Where, StepShares]:
    """What each stage does with a step, from the step's spans, measured or simulated."""
    work = work_of(spans)
    start_s = min(span.start_s for stage in work.values() for span in stage["F"])
    ends: dict[int, float] = {}
    for at, stage in work.items():
        last_s = max(span.stop_s for span in stage["B"])
        ends[at[0]] = max(last_s, ends.get(at[0], last_s))
    updates: dict[Where, Span] = {}
    for span in spans:
        if span.name == "OPTIMIZER" and span.pipeline is not None and span.stage is not None:
            updates.setdefault((span.pipeline, span.stage), span)
    found = {}
    for at, stage in work.items():
        compute_s = sum(lengths(stage["F"] + stage["B"]))
        update = updates.get(at)
        bubble_s = ends[at[0]] - start_s - compute_s
        sync_s = 0.0 if update is None else max(0.0, update.start_s - ends[at[0]])
        optimizer_s = 0.0 if update is None else update.duration_s
        parts = (compute_s, bubble_s, sync_s, optimizer_s)
        compute, bubble, sync, optimizer = (part / step_time_s for part in parts)
        found[at] = StepShares(
            compute=compute,
            bubble=bubble,
            sync=sync,
            optimizer=optimizer,
            other=1.0 - compute - bubble - sync - optimizer,
        )
    return found


def slowest_of(stages: Sequence[StageReport]) -> Slowest:
    """The stage that computes the longest part of the step, the first of equal ones."""
    stage = max(stages, key=lambda s: s.measured_shares.compute)
    shares = stage.measured_shares
    causes = {
        "compute": shares.compute,
        "bubble": shares.bubble,
        "sync": shares.sync,
        "other": shares.other,
    }
    over = None
    if stage.predicted_forward_s is not None and stage.predicted_backward_s is not None:
        predicted_s = stage.predicted_forward_s + stage.predicted_backward_s
        over = (stage.measured_forward_s + stage.measured_backward_s) / predicted_s - 1
    cause = max(causes, key=lambda name: causes[name])
    return Slowest(
        pipeline=stage.pipeline,
        stage=stage.stage,
        cause=cause,  # type: ignore[arg-type] # a key of `causes`
        compute_over_predicted=over,
    )


def stages_of(
    plan: Plan, simulation: Simulation | None, steps: Sequence[list[Span]], step_time_s: float
) -> tuple[StageReport, ...]:
    """Every stage, predicted against measured, by pipeline and stage."""
    durations: dict[tuple[Where, str], list[float]] = defaultdict(list)
    for spans in steps:
        for at, work in work_of(spans).items():
            for name, found in work.items():
                durations[at, name] += lengths(found)
    measured_shares = [step_shares(spans, step_time_s) for spans in steps]
    predicted_shares: dict[Where, StepShares] = {}
    if simulation is not None:
        predicted_shares = step_shares(simulation.spans, simulation.step_time_s)
    figures = {} if simulation is None else {(f.pipeline, f.stage): f for f in simulation.stages}
    reports = []
    for i, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            forward_s, backward_s = durations[(i, s), "F"], durations[(i, s), "B"]
            predicted = figures.get((i, s))
            if predicted is None:
                predicted_s = _paced(plan, i, s)
                predicted_busy = _paced_busy_share(plan, i, predicted_s)
            else:
                predicted_s = predicted.forward_s, predicted.backward_s
                predicted_busy = predicted.busy_share
            busy_s = (sum(forward_s) + sum(backward_s)) / len(steps)
            reports.append(
                StageReport(
                    pipeline=i,
                    stage=s,
                    devices=stage.devices,
                    blocks=stage.blocks,
                    predicted_forward_s=predicted_s[0],
                    measured_forward_s=statistics.median(forward_s),
                    predicted_backward_s=predicted_s[1],
                    measured_backward_s=statistics.median(backward_s),
                    predicted_busy_share=predicted_busy,
                    measured_busy_share=busy_s / step_time_s,
                    predicted_shares=predicted_shares.get((i, s)),
                    measured_shares=_median([shares[i, s] for shares in measured_shares]),
                )
            )
    return tuple(reports)


def _median(shares: Sequence[StepShares]) -> StepShares:
    """The medians of all parts but the last, which is what they leave."""
    compute, bubble, sync, optimizer = (
        statistics.median(getattr(one, name) for one in shares)
        for name in ("compute", "bubble", "sync", "optimizer")
    )
    return StepShares(
        compute=compute,
        bubble=bubble,
        sync=sync,
        optimizer=optimizer,
        other=1.0 - compute - bubble - sync - optimizer,
    )


def _paced(plan: Plan, pipeline: int, stage: int) -> PredictedTimes:
    """The times that an emulated stage keeps to, which stand in the plan itself."""
    try:
        pace = stage_pace(plan, pipeline=pipeline, stage=stage)
    except LookupError:
        pace = None
    return (None, None) if pace is None else (sum(pace.forward_s), sum(pace.backward_s))


def _paced_busy_share(plan: Plan, pipeline: int, times: PredictedTimes) -> float | None:
    forward_s, backward_s = times
    if plan.predicted is None or forward_s is None or backward_s is None:
        return None
    work_s = plan.pipelines[pipeline].micro_batches * (forward_s + backward_s)
    return work_s / plan.predicted.step_time_s
