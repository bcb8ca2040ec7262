"""Why a plan is as it is: what limits it, what memory decides, and what would help most.

Everything is computed: what would be otherwise is found by a search for each change, and a change
counts only where the step time falls by more than `LEAST_GAIN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.again import Progress, SearchAgain
from eth_cli.search.answer import Rival, SearchReport
from eth_cli.search.edits import (
    has_slow_overrides,
    one_more_device,
    with_faster_links,
    with_memory,
    without_slow_overrides,
)
from eth_cli.search.memory import StageMemory
from eth_cli.search.simulate import StageFigures

LEAST_GAIN = 0.001
"""Part of the step time that a change must save to be said to help."""
MORE_MEMORY = 2.0
"""What memory decides is what changes with so many times as much."""
SOME_MORE_MEMORY = 1.25
FASTER = 2.0
"""The changes that are tried: so many times the memory of a type, the bandwidth of links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The stage that is busiest in the pipeline that ends last."""

    pipeline: int
    stage: int
    devices: tuple[str, ...]
    device_type: str
    blocks: tuple[int, int]
    micro_batches: int
    forward_s: float
    backward_s: float
    """Of one micro-batch [s]."""
    busy_s: float
    """It computes for so long: micro-batches x (forward + backward) [s]."""
    idle_s: float
    """The rest of the step [s]."""
    step_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemoryTerms:
    """Peak memory of each device of a stage."""

    pipeline: int
    stage: int
    devices: tuple[str, ...]
    device_type: str
    num_in_flight: int
    terms: dict[str, int]
    """Bytes by the name of the term; they sum to total_bytes."""
    total_bytes: int
    capacity_bytes: int


class StageChange(NamedTuple):
    """A device whose stage is another one where its type has more memory."""

    device: str
    blocks: int
    blocks_then: int
    recompute: bool
    recompute_then: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDecision:
    """What the memory of a type decides: the plan with `MORE_MEMORY` times as much."""

    device_type: str
    step_time_s: float
    """Step time with more memory; the plan's own where no better one was found [s]."""
    gain: float
    """Part of the step time that it would save."""
    pipelines: int
    pipelines_then: int
    stages: tuple[StageChange, ...]
    """Stages that would hold more blocks or recompute less; empty where memory decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterChange:
    """One change to the cluster, and what a step takes after it."""

    words: str
    step_time_s: float | None
    """None: no plan was found [s]."""
    gain: float
    """Part of the step time that it saves; 0 where it does not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why a plan is as it is."""

    step_time_s: float
    limit: Limit
    terms: dict[str, float]
    """Parts of the step time along the pipeline that ends last; they sum to it [s]."""
    memory: tuple[StageMemoryTerms, ...]
    memory_decisions: tuple[MemoryDecision, ...]
    """One for each type that the plan may use."""
    unused: dict[str, tuple[str, ...]]
    """Devices that are left out, by reason."""
    baselines: tuple[Rival, ...]
    changes: tuple[ClusterChange, ...]
    """Single changes to the cluster, the one that helps most first."""
    num_searches: int

    @property
    def best_change(self) -> ClusterChange | None:
        """The change that helps most; None: none of those that were tried helps."""
        return self.changes[0] if self.changes and self.changes[0].gain > 0 else None


def explain(
    report: SearchReport,
    profile: Profile,
    cluster: Cluster,
    replanner: SearchAgain,
    *,
    progress: Progress | None = None,
) -> Explanation:
    """Explain a plan. Takes two to three searches for each device type, and up to three more."""
    questions = [*_memory_questions(report, cluster, replanner), *_changes(cluster, profile)]
    decisions: list[MemoryDecision] = []
    changes: list[ClusterChange] = []
    for done, question in enumerate(questions):
        if progress is not None:
            progress(done, len(questions), question.words)
        if question.decides_for:
            decisions.append(_decision(report, question, replanner))
        else:
            time_s = replanner.best_on(report, question.cluster, profile=question.profile)
            gain = _gain(report.step_time_s, time_s)
            changes.append(ClusterChange(words=question.words, step_time_s=time_s, gain=gain))
    changes.sort(key=lambda change: -change.gain)
    unused: dict[str, tuple[str, ...]] = {}
    for entry in report.plan.unused_devices:
        unused[entry.reason] = (*unused.get(entry.reason, ()), entry.device)
    return Explanation(
        step_time_s=report.step_time_s,
        limit=_limit(report, cluster),
        terms=dict(report.simulation.terms),
        memory=tuple(_memory_terms(report, cluster)),
        memory_decisions=tuple(decisions),
        unused=unused,
        baselines=report.rivals,
        changes=tuple(changes),
        num_searches=len(questions),
    )


class _Question(NamedTuple):
    """A changed cluster to search a plan for."""

    words: str
    cluster: Cluster
    profile: Profile | None = None
    """None: the profile does not change."""
    decides_for: str = ""
    """The type whose memory the question is about; empty: it is a change that may help."""


def _memory_questions(
    report: SearchReport, cluster: Cluster, replanner: SearchAgain
) -> Iterator[_Question]:
    used = {cluster.devices[place.device].type for place in report.plan.ranks}
    for device_type in sorted(used):
        more = with_memory(cluster, device_type, MORE_MEMORY)
        yield _Question(f"{device_type} with more memory", more, decides_for=device_type)


def _changes(cluster: Cluster, profile: Profile) -> Iterator[_Question]:
    types = sorted({d.type for d in cluster.devices.values()} & set(profile.device_types))
    node = "in a new node" if cluster.network.inter_node is not None else "in the node"
    for t in types:
        yield _Question(f"one {t} more, {node}", one_more_device(cluster, t))
    for t in types:
        percent = round(100 * (SOME_MORE_MEMORY - 1))
        yield _Question(
            f"{percent} % more memory on every {t}", with_memory(cluster, t, SOME_MORE_MEMORY)
        )
    if len(cluster.nodes) > 1:
        yield _Question(
            f"{FASTER:g} x the bandwidth between nodes",
            *with_faster_links(cluster, profile, between_nodes=True, factor=FASTER),
        )
    if any(n.num_devices > 1 for n in cluster.nodes):
        yield _Question(
            f"{FASTER:g} x the bandwidth inside nodes",
            *with_faster_links(cluster, profile, between_nodes=False, factor=FASTER),
        )
    if has_slow_overrides(cluster):
        yield _Question(
            "the slower links between nodes as fast as the others", without_slow_overrides(cluster)
        )


def _gain(now_s: float, then_s: float | None) -> float:
    gain = 0.0 if then_s is None else 1.0 - then_s / now_s
    return gain if gain > LEAST_GAIN else 0.0


# --- The plan as it is ----------------------------------------------------------------------------


def _limit(report: SearchReport, cluster: Cluster) -> Limit:
    simulation = report.simulation
    figures = limiting_stage(report)
    pipeline = report.plan.pipelines[figures.pipeline]
    stage = pipeline.stages[figures.stage]
    busy_s = pipeline.micro_batches * (figures.forward_s + figures.backward_s)
    return Limit(
        pipeline=figures.pipeline,
        stage=figures.stage,
        devices=stage.devices,
        device_type=cluster.devices[stage.devices[0]].type,
        blocks=stage.blocks,
        micro_batches=pipeline.micro_batches,
        forward_s=figures.forward_s,
        backward_s=figures.backward_s,
        busy_s=busy_s,
        idle_s=max(0.0, simulation.step_time_s - busy_s),
        step_time_s=simulation.step_time_s,
    )


def limiting_stage(report: SearchReport) -> StageFigures:
    """The busiest stage of the pipeline that ends last."""
    critical = [
        f for f in report.simulation.stages if f.pipeline == report.simulation.critical_pipeline
    ]
    return max(critical, key=lambda figures: figures.busy_share)


def _memory_terms(report: SearchReport, cluster: Cluster) -> Iterator[StageMemoryTerms]:
    for figures in report.simulation.stages:
        devices = report.plan.pipelines[figures.pipeline].stages[figures.stage].devices
        yield StageMemoryTerms(
            pipeline=figures.pipeline,
            stage=figures.stage,
            devices=devices,
            device_type=cluster.devices[devices[0]].type,
            num_in_flight=figures.num_in_flight,
            terms={
                field.name.removesuffix("_bytes"): getattr(figures.memory, field.name)
                for field in fields(StageMemory)
            },
            total_bytes=figures.memory.total_bytes,
            capacity_bytes=figures.capacity_bytes,
        )


# --- The plan as it would be ----------------------------------------------------------------------


def _decision(report: SearchReport, question: _Question, replanner: SearchAgain) -> MemoryDecision:
    answer = replanner.on(question.cluster)
    then_s = None if isinstance(answer, InfeasibleError) else answer.step_time_s
    gain = _gain(report.step_time_s, then_s)
    plan = report.plan
    # A plan that is no faster differs by chance, not because of memory.
    then = plan if isinstance(answer, InfeasibleError) or not gain else answer.plan
    return MemoryDecision(
        device_type=question.decides_for,
        step_time_s=min(then_s or report.step_time_s, report.step_time_s),
        gain=gain,
        pipelines=len(plan.pipelines),
        pipelines_then=len(then.pipelines),
        stages=tuple(_stage_changes(plan, then, question)),
    )


def _stage_changes(plan: Plan, then: Plan, question: _Question) -> Iterator[StageChange]:
    stages_then = {
        device: stage for p in then.pipelines for stage in p.stages for device in stage.devices
    }
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            device = stage.devices[0]
            other = stages_then.get(device)
            if question.cluster.devices[device].type != question.decides_for or other is None:
                continue
            blocks, blocks_then = (s.blocks[1] - s.blocks[0] for s in (stage, other))
            if blocks_then > blocks or (stage.recompute and not other.recompute):
                yield StageChange(device, blocks, blocks_then, stage.recompute, other.recompute)
