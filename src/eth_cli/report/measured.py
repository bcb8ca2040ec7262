"""Measured terms of the step time, from the spans that workers wrote."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from eth_cli.events import Span
from eth_cli.plan import Plan
from eth_cli.report.figures import TermReport
from eth_cli.search.simulate import Simulation
from eth_cli.search.timeline import PipelineTimes, run_pipeline

TERMS = ("compute_s", "bubble_s", "p2p_s", "gradsync_s", "optimizer_s")
"""Terms of the step time, as the prediction names them."""
OTHER = "other_s"
"""What the terms do not explain: reading data, logging, and that medians do not add up."""

Where = tuple[int, int]
"""A pipeline and a stage."""


def work_of(spans: Iterable[Span]) -> dict[Where, dict[str, list[Span]]]:
    """Forwards and backwards of each stage.

    Those of one of its ranks: devices that share a stage do the same, each its part.
    """
    found: dict[Where, dict[int, dict[str, list[Span]]]] = defaultdict(dict)
    for span in spans:
        if span.name in ("F", "B") and span.pipeline is not None and span.stage is not None:
            of_rank = found[span.pipeline, span.stage].setdefault(span.rank, {"F": [], "B": []})
            of_rank[span.name].append(span)
    return {at: ranks[min(ranks)] for at, ranks in found.items()}


def measure_step(spans: Iterable[Span]) -> dict[str, float]:
    """Terms of one step from its spans [s], along its critical pipeline.

    That is the one whose last backward ends last; its bottleneck is the stage with the most work.
    compute: the bottleneck's work. bubble: what the bottleneck would wait if the pipeline ran its
    action lists with this step's mean durations and transfers took no time. p2p: what the pipeline
    took beyond that, jitter included. gradsync: from its last backward until the update of the rank
    that updates last. optimizer: that update. A step without updates has 0 for the last two.
    """
    spans = list(spans)
    work = work_of(spans)
    updates = [span for span in spans if span.name == "OPTIMIZER"]
    ends = {at: max(s.stop_s for s in stage["B"]) for at, stage in work.items()}
    critical = max(ends, key=lambda at: (ends[at], -at[0]))[0]
    stages = [work[at] for at in sorted(work) if at[0] == critical]
    start_s = min(span.start_s for span in stages[0]["F"])
    length_s = max(ends[at] for at in ends if at[0] == critical) - start_s
    compute_s = max(sum(lengths(stage["F"] + stage["B"])) for stage in stages)
    no_transfers = (0.0,) * (len(stages) - 1)
    replay = run_pipeline(
        PipelineTimes(
            tuple(statistics.fmean(lengths(stage["F"])) for stage in stages),
            tuple(statistics.fmean(lengths(stage["B"])) for stage in stages),
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


def lengths(spans: Iterable[Span]) -> list[float]:
    return [span.duration_s for span in spans]


def spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def terms_of(
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
