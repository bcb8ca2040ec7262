"""What a set of placed pipelines costs: durations, step time and memory, as named terms.

`CostModel.evaluate` is the one way to a step time, used by the search for every candidate and by
`simulate` for a plan. `closed_form` is the textbook formula beside it: equal where that is exact.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from eth_cli.buckets import BUCKET_BYTES, GRADIENT_BYTES
from eth_cli.cluster import Cluster, Device
from eth_cli.profile.table import Profile
from eth_cli.schedule import num_in_flight
from eth_cli.search.blocks import BlockTables
from eth_cli.search.comm import Network, Ring, all_reduce_s
from eth_cli.search.gradsync import Bucket, Transfer, buckets, run_sync
from eth_cli.search.memory import StageMemory, stage_memory
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.timeline import PipelineRun, PipelineTimes, chain_s, period_s, run_pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTerms:
    """Parts of the step time along its critical pipeline, the one whose last backward ends last."""

    compute_s: float
    """Work of its bottleneck stage: micro-batches x (forward + backward) [s]."""
    bubble_s: float
    """Time that the bottleneck stage waits, were transfers to take no time [s]."""
    p2p_s: float
    """What transfers between stages add to that [s]."""
    gradsync_s: float
    """Gradient sync that no computation of the critical pipeline hides [s]."""
    optimizer_s: float
    """The longest optimizer update of any device; it starts when the global norm is known [s]."""

    @property
    def total_s(self) -> float:
        """The step time: the sum of the terms [s]."""
        return float(sum(astuple(self)))

    def as_dict(self) -> dict[str, float]:
        """Terms by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Evaluation(NamedTuple):
    """Everything that one step of some placed pipelines does, and when."""

    step_time_s: float
    times: tuple[PipelineTimes, ...]
    runs: tuple[PipelineRun, ...]
    buckets: tuple[Bucket, ...]
    sync_spans: tuple[tuple[float, float], ...]
    """Start and end of every bucket's all-reduce."""
    optimizer_start_s: float
    """When all gradients are summed everywhere, so that the global norm is known."""
    optimizer_s: tuple[tuple[float, ...], ...]
    """Length of every stage's update, by pipeline and stage."""


_Flows = Counter[tuple[str, bool]]
"""Transfers by node and whether they leave it (True) or enter it."""


class CostModel:
    """Costs on one cluster with one profile. Remembers what it computed; has no other state."""

    def __init__(
        self, profile: Profile, cluster: Cluster, *, bucket_bytes: float = BUCKET_BYTES
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.tables = BlockTables(profile)
        self.network = Network(cluster, profile)
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[object, tuple[Bucket, ...]] = {}
        self._rings: dict[tuple[tuple[Device, ...], ...], Ring] = {}
        self._optimizer: dict[tuple[str, int, int, int], float] = {}

    def stage_times_s(self, stage: PlacedStage, micro_batch_size: int) -> tuple[float, float]:
        """Forward and backward of a stage for one micro-batch [s]. Raises ConfigError."""
        table = self.tables.table(stage.devices[0].type, len(stage.devices), micro_batch_size)
        return table.times_s(stage.start, stage.stop, recompute=stage.recompute)

    def times(self, pipeline: PlacedPipeline) -> PipelineTimes:
        """Durations of a pipeline alone on the network: a lower bound. Raises ConfigError."""
        return self._times(pipeline, Counter(), Counter())

    def plan_times(self, pipelines: Sequence[PlacedPipeline]) -> tuple[PipelineTimes, ...]:
        """Durations that a plan's schedules run with. Raises ConfigError.

        Like pipelines run nearly in step, so all transfers of one direction (activations, or
        gradients) that a NIC carries are taken to meet: each goes at the rate of the larger of the
        numbers that leave the sender's node and that enter the receiver's.
        """
        down: _Flows = Counter()
        up: _Flows = Counter()
        for pipeline in pipelines:
            for upper, lower in itertools.pairwise(pipeline.stages):
                above, below = upper.devices[0].node, lower.devices[0].node
                if above != below:
                    down[above, True] += len(lower.devices)
                    down[below, False] += len(lower.devices)
                    up[below, True] += len(upper.devices)
                    up[above, False] += len(upper.devices)
        return tuple(self._times(pipeline, down, up) for pipeline in pipelines)

    def _times(self, pipeline: PlacedPipeline, down: _Flows, up: _Flows) -> PipelineTimes:
        size = pipeline.micro_batch_size
        num_bytes = self.profile.model.boundary_bytes_per_sample * size
        compute = [self.stage_times_s(stage, size) for stage in pipeline.stages]
        groups = [stage.devices for stage in pipeline.stages]

        def send_s(source: tuple[Device, ...], target: tuple[Device, ...], flows: _Flows) -> float:
            at_once = max(flows[source[0].node, True], flows[target[0].node, False])
            return self.network.boundary_s(source, target, num_bytes, flows=at_once)

        return PipelineTimes(
            tuple(forward for forward, _ in compute),
            tuple(backward for _, backward in compute),
            tuple(send_s(upper, lower, down) for upper, lower in itertools.pairwise(groups)),
            tuple(send_s(lower, upper, up) for upper, lower in itertools.pairwise(groups)),
        )

    def optimizer_s(self, device_type: str, tensor_parallel: int, start: int, stop: int) -> float:
        """Optimizer update of the parameters that one device of a stage holds [s]."""
        key = (device_type, tensor_parallel, start, stop)
        time_s = self._optimizer.get(key)
        if time_s is None:
            num_parameters = self.profile.model.stage_parameters(start, stop) / tensor_parallel
            rate = self.profile.optimizer_s_per_parameter(device_type)
            time_s = self._optimizer[key] = num_parameters * rate
        return time_s

    def memory(
        self, pipeline: PlacedPipeline, stage_index: int, *, optimizer_fraction: float = 1.0
    ) -> StageMemory:
        """Peak memory of each device of a stage. Raises ConfigError."""
        stage = pipeline.stages[stage_index]
        table = self.tables.table(
            stage.devices[0].type, len(stage.devices), pipeline.micro_batch_size
        )
        return stage_memory(
            self.profile,
            table,
            start=stage.start,
            stop=stage.stop,
            num_in_flight=num_in_flight(
                stage_index,
                num_stages=len(pipeline.stages),
                num_micro_batches=pipeline.micro_batches,
            ),
            recompute=stage.recompute,
            optimizer_fraction=optimizer_fraction,
        )

    def buckets(self, pipelines: Sequence[PlacedPipeline]) -> tuple[Bucket, ...]:
        """The gradient buckets of a plan, in launch order."""
        cuts = tuple(pipeline.cuts for pipeline in pipelines)
        found = self._buckets.get(cuts)
        if found is None:
            found = self._buckets[cuts] = buckets(
                self.profile.model, cuts, bucket_bytes=self._bucket_bytes
            )
        return found

    def evaluate(
        self,
        pipelines: Sequence[PlacedPipeline],
        *,
        overlap: bool = True,
        sharded_optimizer: bool = False,
    ) -> Evaluation:
        """Simulate one step. Raises ConfigError where the profile lacks an entry.

        Args:
            overlap: whether a bucket is launched when its last backward is done, to run beside
                the rest of the backward; else each rank syncs after all of its backward.
            sharded_optimizer: whether the owners of a parameter split its update.
        """
        times = self.plan_times(pipelines)
        runs = tuple(
            run_pipeline(t, p.micro_batches) for t, p in zip(times, pipelines, strict=True)
        )
        found = self.buckets(pipelines)
        spans = run_sync([self._transfer(bucket, pipelines, runs, overlap) for bucket in found])
        ready = max(run.end_s for run in runs)
        ready = max([ready, *(stop for _, stop in spans)])
        parts = len(pipelines) if sharded_optimizer else 1
        optimizer = tuple(
            tuple(
                self.optimizer_s(s.devices[0].type, len(s.devices), s.start, s.stop) / parts
                for s in pipeline.stages
            )
            for pipeline in pipelines
        )
        return Evaluation(
            ready + max(max(stages) for stages in optimizer),
            times,
            runs,
            found,
            tuple(spans),
            ready,
            optimizer,
        )

    def _transfer(
        self,
        bucket: Bucket,
        pipelines: Sequence[PlacedPipeline],
        runs: Sequence[PipelineRun],
        overlap: bool,
    ) -> Transfer:
        launch = 0.0
        for (i, s), lowest in zip(bucket.owners, bucket.lowest_block, strict=True):
            ready = runs[i].stage_end_s[s]
            stage = pipelines[i].stages[s]
            if overlap and lowest > stage.start:
                # What the last micro-batch's backward still has to do below the bucket.
                below = stage._replace(stop=lowest)
                ready -= self.stage_times_s(below, pipelines[i].micro_batch_size)[1]
            launch = max(launch, ready)
        groups = [pipelines[i].stages[s].devices for i, s in bucket.owners]
        return Transfer(
            bucket.owners, launch, bucket.num_parameters * GRADIENT_BYTES, self._ring(groups)
        )

    def _ring(self, groups: Sequence[tuple[Device, ...]]) -> Ring:
        key = tuple(groups)
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = self.network.ring(groups)
        return ring

    def terms(
        self, pipelines: Sequence[PlacedPipeline], evaluation: Evaluation
    ) -> tuple[int, CostTerms]:
        """The critical pipeline (the first of those that end last) and the step's terms."""
        ends = [run.end_s for run in evaluation.runs]
        critical = ends.index(max(ends))
        times = evaluation.times[critical]
        micro_batches = pipelines[critical].micro_batches
        compute = micro_batches * max(
            f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)
        )
        without = run_pipeline(times.without_transfers(), micro_batches).end_s
        return critical, CostTerms(
            compute_s=compute,
            bubble_s=_beyond_rounding(without - compute, without),
            p2p_s=_beyond_rounding(ends[critical] - without, without),
            gradsync_s=evaluation.optimizer_start_s - ends[critical],
            optimizer_s=evaluation.step_time_s - evaluation.optimizer_start_s,
        )

    def closed_form(self, pipelines: Sequence[PlacedPipeline]) -> CostTerms:
        """The step time by formula, along the pipeline that takes longest by it.

        ``T_i = sum_s (f_s + b_s) + 2 sum_edges c + (m_i - 1) B`` with the pace B of
        `timeline.period_s`; of gradient sync only what can never be hidden, the buckets that block
        0's backward or a tied weight completes, each at the full rate of its links. Exact for
        uniform stages without communication. For uneven ones it is an estimate: too long where
        the bottleneck's work hides the filling, too short where sync queues up. No search goes by
        it: it is there as the independent check of `evaluate`.
        """
        paces = self.plan_times(pipelines)
        totals = [
            chain_s(t) + (p.micro_batches - 1) * period_s(t)
            for t, p in zip(paces, pipelines, strict=True)
        ]
        critical = totals.index(max(totals))
        times, pipeline = paces[critical], pipelines[critical]
        stage_times = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
        last = [b for b in self.buckets(pipelines) if b.is_tied or b.blocks[0] == 0]
        return CostTerms(
            compute_s=pipeline.micro_batches * max(stage_times),
            bubble_s=sum(stage_times) - max(stage_times),
            p2p_s=sum(times.send_forward_s)
            + sum(times.send_backward_s)
            + (pipeline.micro_batches - 1) * (period_s(times) - max(stage_times)),
            gradsync_s=sum(
                all_reduce_s(
                    self._ring([pipelines[i].stages[s].devices for i, s in bucket.owners]),
                    bucket.num_parameters * GRADIENT_BYTES,
                )
                for bucket in last
            ),
            optimizer_s=max(
                self.optimizer_s(s.devices[0].type, len(s.devices), s.start, s.stop)
                for p in pipelines
                for s in p.stages
            ),
        )


def _beyond_rounding(difference_s: float, of_s: float) -> float:
    """A difference of two times, 0 where it is less than adding them up may be off [s]."""
    return difference_s if abs(difference_s) > 1e-12 * of_s else 0.0
