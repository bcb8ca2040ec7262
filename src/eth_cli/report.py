"""Predicted against measured: where a run's step time went, term by term and stage by stage.

Reads a run folder and changes nothing. Measured terms are defined as the predicted ones are
(`search.cost.CostTerms`), from the spans that workers wrote; `measure_step` says how.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eth_cli.errors import ConfigError
from eth_cli.events import Scalar, Span, read_events
from eth_cli.launch.config import RunFolder
from eth_cli.launch.paces import missed_paces
from eth_cli.launch.progress import StepRecord, read_metrics
from eth_cli.launch.runtime.pacing import stage_pace
from eth_cli.plan import Plan, read_plan
from eth_cli.profile.table import read_profile
from eth_cli.search.simulate import Simulation, simulate
from eth_cli.search.timeline import PipelineTimes, run_pipeline

TERMS = ("compute_s", "bubble_s", "p2p_s", "gradsync_s", "optimizer_s")
"""Terms of the step time, as the prediction names them."""
OTHER = "other_s"
"""What the terms do not explain: reading data, logging, and that medians do not add up."""

Where = tuple[int, int]
"""A pipeline and a stage."""


PredictedTimes = tuple[float | None, float | None]
"""Forward and backward of one micro-batch [s]; None where nothing is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """One part of the step time."""

    name: str
    predicted_s: float | None
    """None without a prediction."""
    measured_s: float
    """Median over the steps that count [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """One stage; times are of one micro-batch, measured ones medians."""

    pipeline: int
    stage: int
    devices: tuple[str, ...]
    blocks: tuple[int, int]
    predicted_forward_s: float | None
    measured_forward_s: float
    predicted_backward_s: float | None
    measured_backward_s: float
    predicted_busy_share: float | None
    """Part of the step time that the stage computes; None where its times are not predicted."""
    measured_busy_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run, predicted against measured."""

    run_dir: Path
    model: str
    source: str | None
    """Where the prediction comes from; None when the run folder holds none."""
    num_steps: int
    """Steps that count for the measured figures."""
    num_dropped: int
    """Steps at the start that do not: they also allocate memory and connect."""
    predicted_step_time_s: float | None
    measured_step_time_s: float
    """Median [s]."""
    measured_spread_s: float
    """Interquartile range of the step time [s]."""
    predicted_tokens_per_s: float | None
    measured_tokens_per_s: float
    """Tokens of the global batch, ignored ones included, over the median step time."""
    terms: tuple[TermReport, ...]
    """They sum to the step time."""
    stages: tuple[StageReport, ...]
    first_loss: float | None
    last_loss: float | None
    notes: tuple[str, ...]
    """What a reader should know before trusting the figures."""
    typical_step: int
    """The step whose time is nearest to the median, and whose spans are kept."""
    predicted_spans: tuple[Span, ...]
    """From 0; empty without a profile."""
    measured_spans: tuple[Span, ...]
    """Of the typical step, from 0."""

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less one; None without a prediction."""
        if self.predicted_step_time_s is None:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    def as_data(self) -> dict[str, Any]:
        """Everything but the spans as plain JSON data."""
        data = asdict(replace(self, predicted_spans=(), measured_spans=()))
        del data["predicted_spans"], data["measured_spans"]
        return data | {"run_dir": str(self.run_dir), "error": self.error}


def build_report(run_dir: str | Path) -> Report:
    """The report of a run folder, also of one whose run failed or still goes on.

    Raises:
        ConfigError: a file of the folder is missing or damaged, or no step counts yet.
    """
    folder = RunFolder(run_dir)
    if not folder.root.is_dir():
        raise ConfigError.single(str(folder.root), "", "is not a run folder; no such folder")
    plan = read_plan(folder.plan)
    simulation = _simulation(folder, plan)
    spans, scalars = _events(folder, plan)
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.step is not None:
            by_step[span.step].append(span)
    records = [r for r in read_metrics(folder.metrics) if _is_complete(by_step.get(r.step), plan)]
    if not records:
        raise ConfigError.single(
            str(folder.metrics), "", "holds no step of which every rank wrote its events"
        )
    num_dropped = 1 if len(records) > 1 else 0
    # A skipped step has no update, and so says nothing about the terms.
    counting = [r for r in records[num_dropped:] if r.loss is not None]
    if not counting:
        raise ConfigError.single(str(folder.metrics), "", "holds skipped steps only")
    step_time_s = statistics.median(r.step_time_s for r in counting)
    typical = min(counting, key=lambda r: (abs(r.step_time_s - step_time_s), r.step))
    predicted_s, predicted_tokens = _predicted(plan, simulation)
    stages = _stages(plan, simulation, [by_step[r.step] for r in counting], step_time_s)
    return Report(
        run_dir=folder.root,
        model=plan.model,
        source=_source(folder, plan, simulation),
        num_steps=len(counting),
        num_dropped=num_dropped,
        predicted_step_time_s=predicted_s,
        measured_step_time_s=step_time_s,
        measured_spread_s=_spread([r.step_time_s for r in counting]),
        predicted_tokens_per_s=predicted_tokens,
        measured_tokens_per_s=plan.global_batch_size * plan.seq_len / step_time_s,
        terms=_terms(plan, simulation, [by_step[r.step] for r in counting], step_time_s),
        stages=stages,
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        notes=_notes(plan, simulation, stages, scalars, records),
        typical_step=typical.step,
        predicted_spans=() if simulation is None else simulation.spans,
        measured_spans=_from_zero(by_step[typical.step]),
    )


# --- Reading --------------------------------------------------------------------------------------


def _simulation(folder: RunFolder, plan: Plan) -> Simulation | None:
    if plan.cluster is None or not folder.profile.exists():
        return None
    return simulate(plan, read_profile(folder.profile), plan.cluster)


def _events(folder: RunFolder, plan: Plan) -> tuple[list[Span], list[Scalar]]:
    spans: list[Span] = []
    scalars: list[Scalar] = []
    for place in plan.ranks:
        path = folder.events_of(place.rank)
        for event in read_events(path):
            if event.rank != place.rank:
                raise ConfigError.single(
                    str(path), "", f"holds events of rank {event.rank}; rename it or delete it"
                )
            if isinstance(event, Span):
                # Where a rank stands is the plan's to say.
                spans.append(replace(event, pipeline=place.pipeline, stage=place.stage))
            elif isinstance(event, Scalar):
                scalars.append(event)
    return spans, scalars


def _is_complete(spans: Sequence[Span] | None, plan: Plan) -> bool:
    """Whether every rank has finished a step and told of all its work."""
    if spans is None:
        return False
    finished = {span.rank for span in spans if span.name == "STEP"}
    computed = {(span.rank, span.name) for span in spans if span.name in ("F", "B")}
    return all(
        p.rank in finished and {(p.rank, "F"), (p.rank, "B")} <= computed for p in plan.ranks
    )


def _predicted(plan: Plan, simulation: Simulation | None) -> tuple[float | None, float | None]:
    found = simulation if simulation is not None else plan.predicted
    return (None, None) if found is None else (found.step_time_s, found.tokens_per_s)


def _source(folder: RunFolder, plan: Plan, simulation: Simulation | None) -> str | None:
    if simulation is not None:
        return f"simulated with {folder.profile.name}"
    return folder.plan.name if plan.predicted is not None else None


# --- Measured figures -----------------------------------------------------------------------------


def measure_step(spans: Iterable[Span]) -> dict[str, float]:
    """Terms of one step from its spans [s], along its critical pipeline.

    That is the one whose last backward ends last; its bottleneck is the stage with the most work.
    compute: the bottleneck's work. bubble: what the bottleneck would wait if the pipeline ran its
    action lists with this step's mean durations and transfers took no time. p2p: what the pipeline
    took beyond that, jitter included. gradsync: from its last backward until the update of the rank
    that updates last. optimizer: that update. A step without updates has 0 for the last two.
    """
    work: dict[Where, dict[str, list[Span]]] = defaultdict(lambda: {"F": [], "B": []})
    updates: list[Span] = []
    for span in spans:
        if span.name in ("F", "B") and span.pipeline is not None and span.stage is not None:
            work[span.pipeline, span.stage][span.name].append(span)
        elif span.name == "OPTIMIZER":
            updates.append(span)
    ends = {at: max(s.stop_s for s in stage["B"]) for at, stage in work.items()}
    critical = max(ends, key=lambda at: (ends[at], -at[0]))[0]
    stages = [work[at] for at in sorted(work) if at[0] == critical]
    start_s = min(span.start_s for span in stages[0]["F"])
    length_s = max(ends[at] for at in ends if at[0] == critical) - start_s
    compute_s = max(sum(_lengths(stage["F"] + stage["B"])) for stage in stages)
    no_transfers = (0.0,) * (len(stages) - 1)
    replay = run_pipeline(
        PipelineTimes(
            tuple(statistics.fmean(_lengths(stage["F"])) for stage in stages),
            tuple(statistics.fmean(_lengths(stage["B"])) for stage in stages),
            no_transfers,
            no_transfers,
        ),
        len(stages[0]["F"]),
    )
    bubble_s = max(0.0, replay.end_s - compute_s)
    last = max(updates, key=lambda span: span.stop_s, default=None)
    return {
        "compute_s": compute_s,
        "bubble_s": bubble_s,
        "p2p_s": length_s - compute_s - bubble_s,
        "gradsync_s": 0.0 if last is None else last.start_s - start_s - length_s,
        "optimizer_s": 0.0 if last is None else last.duration_s,
    }


def _lengths(spans: Iterable[Span]) -> list[float]:
    return [span.duration_s for span in spans]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _terms(
    plan: Plan, simulation: Simulation | None, steps: Sequence[list[Span]], step_time_s: float
) -> tuple[TermReport, ...]:
    measured = [measure_step(spans) for spans in steps]
    medians = {name: statistics.median(m[name] for m in measured) for name in TERMS}
    medians[OTHER] = step_time_s - sum(medians.values())
    predicted: Mapping[str, float] | None = None
    if simulation is not None:
        predicted = simulation.terms
    elif plan.predicted is not None and plan.predicted.terms:
        predicted = plan.predicted.terms
    return tuple(
        TermReport(
            name=name,
            predicted_s=None if predicted is None else predicted.get(name, 0.0),
            measured_s=measured_s,
        )
        for name, measured_s in medians.items()
    )


def _stages(
    plan: Plan, simulation: Simulation | None, steps: Sequence[list[Span]], step_time_s: float
) -> tuple[StageReport, ...]:
    lengths: dict[tuple[Where, str], list[float]] = defaultdict(list)
    for spans in steps:
        for span in spans:
            if span.name in ("F", "B") and span.pipeline is not None and span.stage is not None:
                lengths[(span.pipeline, span.stage), span.name].append(span.duration_s)
    figures = {} if simulation is None else {(f.pipeline, f.stage): f for f in simulation.stages}
    reports = []
    for i, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            forward_s, backward_s = lengths[(i, s), "F"], lengths[(i, s), "B"]
            predicted = figures.get((i, s))
            if predicted is None:
                predicted_s = _paced(plan, i, s)
                predicted_busy = _paced_busy_share(plan, i, predicted_s)
            else:
                predicted_s = predicted.forward_s, predicted.backward_s
                predicted_busy = predicted.busy_share
            busy_s = (sum(forward_s) + sum(backward_s)) / len(steps) / stage.tensor_parallel
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
                )
            )
    return tuple(reports)


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


def _from_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans with the first forward at 0, as predicted ones are."""
    zero_s = min(span.start_s for span in spans if span.name == "F")
    shifted = (
        replace(span, start_s=span.start_s - zero_s, stop_s=span.stop_s - zero_s) for span in spans
    )
    return tuple(sorted(shifted, key=lambda span: (span.start_s, span.rank)))


def _notes(
    plan: Plan,
    simulation: Simulation | None,
    stages: Iterable[StageReport],
    scalars: Iterable[Scalar],
    records: Sequence[StepRecord],
) -> tuple[str, ...]:
    notes = []
    if simulation is None and plan.predicted is None:
        notes.append("nothing is predicted: run the plan with --cluster and --profile")
    elif any(stage.predicted_forward_s is None for stage in stages):
        notes.append(
            "of stages on real devices nothing is predicted: the run folder holds no profile; "
            "run the plan with --profile"
        )
    skipped = [r.step for r in records if r.loss is None]
    if skipped:
        notes.append(f"{len(skipped)} steps were skipped (not finite), the first is {skipped[0]}")
    if note := missed_paces(scalars):
        notes.append(note)
    return tuple(notes)
