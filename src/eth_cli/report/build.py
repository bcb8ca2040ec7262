"""The report of a run folder."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from eth_cli.errors import ConfigError
from eth_cli.events import Scalar, Span, read_events
from eth_cli.launch.config import RunFolder
from eth_cli.launch.paces import missed_paces
from eth_cli.launch.progress import StepRecord, read_metrics
from eth_cli.plan import Plan, read_plan
from eth_cli.profile.table import read_profile
from eth_cli.report import measured
from eth_cli.report.figures import RankMemory, Report, StageReport
from eth_cli.report.memory import rank_memory
from eth_cli.report.stages import slowest_of, stages_of
from eth_cli.search.simulate import Simulation, simulate


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
    steps = [by_step[r.step] for r in counting]
    stages = stages_of(plan, simulation, steps, step_time_s)
    terms = measured.terms_of(plan, simulation, steps, step_time_s)
    memory = rank_memory(plan, simulation, scalars)
    return Report(
        run_dir=folder.root,
        model=plan.model,
        source=_source(folder, plan, simulation),
        num_steps=len(counting),
        num_dropped=num_dropped,
        predicted_step_time_s=predicted_s,
        measured_step_time_s=step_time_s,
        measured_spread_s=measured.spread([r.step_time_s for r in counting]),
        predicted_tokens_per_s=predicted_tokens,
        measured_tokens_per_s=plan.global_batch_size * plan.seq_len / step_time_s,
        terms=terms,
        exposed_sync=next(term for term in terms if term.name == "gradsync_s"),
        stages=stages,
        slowest=slowest_of(stages),
        memory=memory,
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        notes=_notes(plan, simulation, stages, scalars, records, memory),
        typical_step=typical.step,
        records=tuple(records),
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
    memory: Sequence[RankMemory],
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
    if any(m.is_emulated and m.measured_bytes is not None for m in memory):
        notes.append(
            "memory of emulated devices is that of the CPU processes that play them, Python and "
            "torch included; it says nothing about the devices"
        )
    if note := missed_paces(scalars):
        notes.append(note)
    return tuple(notes)
