"""Discrete-event simulation of one step of any legal plan: `simulate`.

It runs the action lists that the runtime executes (`timeline`), the gradient sync (`gradsync`) and
the optimizer, with costs from `cost.CostModel`. What it leaves out: jitter, data loading, kernel
launch gaps that the profile's block times do not contain, and stragglers.
"""

from __future__ import annotations

from dataclasses import dataclass

from eth_cli.buckets import BUCKET_BYTES
from eth_cli.cluster import Cluster
from eth_cli.events import Span
from eth_cli.plan import DeviceMemory, Plan, Prediction
from eth_cli.profile.table import Profile
from eth_cli.schedule import num_in_flight
from eth_cli.search.cost import CostModel, Evaluation
from eth_cli.search.memory import StageMemory
from eth_cli.search.placed import PlacedPipeline, from_plan
from eth_cli.search.timeline import compute_steps, trace_pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigures:
    """What one stage does in the step."""

    pipeline: int
    stage: int
    forward_s: float
    """Forward of one micro-batch [s]."""
    backward_s: float
    """Backward of one micro-batch, recomputation included [s]."""
    busy_share: float
    """Part of the step time that the stage computes."""
    num_in_flight: int
    """Micro-batches whose activations it holds at the peak."""
    end_s: float
    """When its last backward ends [s]."""
    memory: StageMemory
    """Peak memory of each of its devices, term by term."""
    capacity_bytes: int
    """Memory of each of its devices [bytes]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryExcess:
    """A device that the plan puts too much on."""

    device: str
    device_type: str
    pipeline: int
    stage: int
    needed_bytes: int
    capacity_bytes: int

    @property
    def lacking_bytes(self) -> int:
        """How many bytes are missing."""
        return self.needed_bytes - self.capacity_bytes

    def __str__(self) -> str:
        return (
            f"stage {self.stage} of pipeline {self.pipeline} needs {self.needed_bytes} bytes on "
            f"{self.device} ({self.device_type}), which has {self.capacity_bytes}: "
            f"{self.lacking_bytes} bytes are lacking"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One simulated step. Times are seconds since its start."""

    step_time_s: float
    tokens_per_s: float
    terms: dict[str, float]
    """Named parts of the step time along the critical pipeline; they sum to it [s]."""
    critical_pipeline: int
    """The pipeline whose last backward ends last."""
    pipeline_end_s: tuple[float, ...]
    """When each pipeline's last backward ends [s]."""
    spans: tuple[Span, ...]
    """F, B, SYNC and OPTIMIZER of every rank, in order of start; empty unless asked for."""
    memory: tuple[DeviceMemory, ...]
    """Peak memory of every device that the plan uses, in rank order."""
    stages: tuple[StageFigures, ...]
    excesses: tuple[MemoryExcess, ...]
    """Devices over their capacity, in rank order; empty for a plan that fits."""

    def prediction(self) -> Prediction:
        """The part of this that a plan carries."""
        return Prediction(
            step_time_s=self.step_time_s,
            tokens_per_s=self.tokens_per_s,
            terms=self.terms,
            memory=self.memory,
        )


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    overlap: bool = True,
    bucket_bytes: float = BUCKET_BYTES,
) -> Simulation:
    """Simulate one step of a plan.

    Args:
        overlap: whether gradient sync runs beside the backward (as `eth run` does) or after it.
        bucket_bytes: most gradients that are summed at once, as of the run.

    Raises:
        ConfigError: the plan does not fit the cluster or the profile, or the profile lacks an
            entry that it needs. A plan over a device's memory is simulated all the same:
            `Simulation.excesses` says so.
    """
    check_plan(plan, profile, cluster)
    model = CostModel(profile, cluster, bucket_bytes=bucket_bytes)
    return simulate_with(model, plan, overlap=overlap)


def check_plan(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Raise ConfigError unless the plan is for this cluster and this profile's model."""
    plan.check_cluster(cluster, file="plan")
    profile.check_plan(plan, file="plan", source=f"the profile of {profile.model.name}")


def simulate_with(
    model: CostModel, plan: Plan, *, overlap: bool = True, with_spans: bool = True
) -> Simulation:
    """The same for a plan that was checked, with a cost model at hand; spans only if wanted."""
    pipelines = from_plan(plan, model.cluster)
    evaluation = model.evaluate(
        pipelines, overlap=overlap, sharded_optimizer=plan.sharded_optimizer
    )
    critical, terms = model.terms(pipelines, evaluation)
    stages = _stage_figures(model, plan, pipelines, evaluation)
    memory, excesses = _memory(plan, model.cluster, stages)
    return Simulation(
        step_time_s=evaluation.step_time_s,
        tokens_per_s=plan.global_batch_size * plan.seq_len / evaluation.step_time_s,
        # Terms are differences of times: a zero may come out as a rounding error below it.
        terms={name: max(0.0, value) for name, value in terms.as_dict().items()},
        critical_pipeline=critical,
        pipeline_end_s=tuple(run.end_s for run in evaluation.runs),
        spans=_spans(plan, pipelines, evaluation) if with_spans else (),
        memory=memory,
        stages=stages,
        excesses=excesses,
    )


def _stage_figures(
    model: CostModel,
    plan: Plan,
    pipelines: tuple[PlacedPipeline, ...],
    evaluation: Evaluation,
) -> tuple[StageFigures, ...]:
    fraction = 1.0 / len(pipelines) if plan.sharded_optimizer else 1.0
    figures = []
    for i, pipeline in enumerate(pipelines):
        times, run = evaluation.times[i], evaluation.runs[i]
        for s, stage in enumerate(pipeline.stages):
            busy_s = pipeline.micro_batches * (times.forward_s[s] + times.backward_s[s])
            figures.append(
                StageFigures(
                    pipeline=i,
                    stage=s,
                    forward_s=times.forward_s[s],
                    backward_s=times.backward_s[s],
                    busy_share=busy_s / evaluation.step_time_s,
                    num_in_flight=num_in_flight(
                        s,
                        num_stages=len(pipeline.stages),
                        num_micro_batches=pipeline.micro_batches,
                    ),
                    end_s=run.stage_end_s[s],
                    memory=model.memory(pipeline, s, optimizer_fraction=fraction),
                    capacity_bytes=model.cluster.device_types[stage.devices[0].type].memory_bytes,
                )
            )
    return tuple(figures)


def _memory(
    plan: Plan, cluster: Cluster, stages: tuple[StageFigures, ...]
) -> tuple[tuple[DeviceMemory, ...], tuple[MemoryExcess, ...]]:
    by_stage = {(figures.pipeline, figures.stage): figures for figures in stages}
    memory, excesses = [], []
    for place in plan.ranks:
        figures = by_stage[place.pipeline, place.stage]
        needed = figures.memory.total_bytes
        memory.append(
            DeviceMemory(device=place.device, bytes=needed, capacity_bytes=figures.capacity_bytes)
        )
        if needed > figures.capacity_bytes:
            excesses.append(
                MemoryExcess(
                    device=place.device,
                    device_type=cluster.devices[place.device].type,
                    pipeline=place.pipeline,
                    stage=place.stage,
                    needed_bytes=needed,
                    capacity_bytes=figures.capacity_bytes,
                )
            )
    return tuple(memory), tuple(excesses)


def _spans(
    plan: Plan, pipelines: tuple[PlacedPipeline, ...], evaluation: Evaluation
) -> tuple[Span, ...]:
    spans: list[Span] = []
    for i, pipeline in enumerate(pipelines):
        times = evaluation.times[i]
        run = trace_pipeline(times, pipeline.micro_batches)
        steps = compute_steps(len(pipeline.stages), pipeline.micro_batches)
        for step, start_s in zip(steps, run.step_starts_s, strict=True):
            length_s = (times.forward_s if step.is_forward else times.backward_s)[step.stage]
            spans += [
                Span(
                    rank=rank,
                    name="F" if step.is_forward else "B",
                    start_s=start_s,
                    stop_s=start_s + length_s,
                    pipeline=i,
                    stage=step.stage,
                    micro_batch=step.micro_batch,
                    blocks=pipeline.cuts[step.stage],
                )
                for rank in plan.ranks_of(i, step.stage)
            ]
    for bucket, (start_s, stop_s) in zip(evaluation.buckets, evaluation.sync_spans, strict=True):
        spans += [
            Span(
                rank=rank,
                name="SYNC",
                start_s=start_s,
                stop_s=stop_s,
                pipeline=i,
                stage=s,
                blocks=bucket.blocks,
            )
            for i, s in bucket.owners
            for rank in plan.ranks_of(i, s)
        ]
    spans += [
        Span(
            rank=place.rank,
            name="OPTIMIZER",
            start_s=evaluation.optimizer_start_s,
            stop_s=evaluation.optimizer_start_s
            + evaluation.optimizer_s[place.pipeline][place.stage],
            pipeline=place.pipeline,
            stage=place.stage,
            blocks=pipelines[place.pipeline].cuts[place.stage],
        )
        for place in plan.ranks
    ]
    # Sorting is stable: equal starts stay in the order of pipelines and stages.
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank)))
