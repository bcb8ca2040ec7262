"""Templates: pipelines over kinds of interchangeable devices, never over device identities.

A `Problem` holds what a search is about; a `Template` is one way to cut the model over an ordered
list of device kinds. `docs/search.md` derives the formulas. Cuts, bounds and capacities of whole
families of templates are in `capacity`, placement on real devices in `place`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.schedule import num_in_flight
from eth_cli.search.comm import GRADIENT_BYTES, Network
from eth_cli.search.cost import CostModel
from eth_cli.search.memory import max_in_flight
from eth_cli.search.timeline import PipelineTimes, run_pipeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[int, ...]
"""Devices of each kind, by kind index."""


class Kind(NamedTuple):
    """Devices that the search does not tell apart."""

    device_type: str
    num_devices: int
    capacity_bytes: int


class TemplateStage(NamedTuple):
    """Blocks ``[start, stop)`` on a group of devices of one kind."""

    kind: int
    start: int
    stop: int
    tensor_parallel: int = 1
    recompute: bool = False


class Template(NamedTuple):
    """A cut of the model over an ordered list of kinds, with a micro-batch size."""

    micro_batch_size: int
    stages: tuple[TemplateStage, ...]

    def counts(self, num_kinds: int) -> Counts:
        """Devices of each kind that one such pipeline takes."""
        used = [0] * num_kinds
        for stage in self.stages:
            used[stage.kind] += stage.tensor_parallel
        return tuple(used)


class StageCosts(NamedTuple):
    """Costs of every possible stage of one kind at one micro-batch size, by [start, stop]."""

    forward_s: Floats
    backward_s: Floats
    in_flight: Ints
    """Most micro-batches in flight that memory has room for; 0: the stage does not fit at all."""
    optimizer_s: Floats

    @property
    def work_s(self) -> Floats:
        """Forward + backward; infinite where there is no stage or it does not fit."""
        return self.forward_s + self.backward_s


class Problem:
    """What a search is about: kinds of devices, micro-batch sizes, the batch, and their costs."""

    def __init__(
        self,
        model: CostModel,
        *,
        kinds: Sequence[Kind],
        micro_batch_sizes: Sequence[int],
        global_batch_size: int,
    ) -> None:
        self.model = model
        self.kinds = tuple(kinds)
        self.micro_batch_sizes = tuple(micro_batch_sizes)
        self.global_batch_size = global_batch_size
        self.num_blocks = model.profile.model.num_blocks
        self._costs: dict[tuple[int, int], StageCosts] = {}
        self._hops: dict[int, Floats] = {}
        self._one_way: dict[tuple[int, int, int], float] = {}
        self._times: dict[Template, PipelineTimes] = {}

    @property
    def network(self) -> Network:
        """Links of the cluster."""
        return self.model.network

    @cached_property
    def counts(self) -> Counts:
        """Devices of each kind that the cluster has."""
        return tuple(kind.num_devices for kind in self.kinds)

    @property
    def max_stages(self) -> int:
        """Most stages that any pipeline can have."""
        return min(self.num_blocks, sum(self.counts))

    def costs(self, kind: int, micro_batch_size: int) -> StageCosts:
        """Costs of all stages of a kind; infinite where the profile has no entry."""
        key = (kind, micro_batch_size)
        if key not in self._costs:
            self._costs[key] = self._make_costs(kind, micro_batch_size)
        return self._costs[key]

    def _make_costs(self, kind_index: int, micro_batch_size: int) -> StageCosts:
        size = self.num_blocks + 1
        costs = StageCosts(
            np.full((size, size), np.inf),
            np.full((size, size), np.inf),
            np.zeros((size, size), dtype=np.int64),
            np.full((size, size), np.inf),
        )
        kind = self.kinds[kind_index]
        if not self.model.tables.has(kind.device_type, 1, micro_batch_size):
            return costs
        table = self.model.tables.table(kind.device_type, 1, micro_batch_size)
        for start in range(self.num_blocks):
            for stop in range(start + 1, size):
                in_flight = max_in_flight(
                    self.model.profile,
                    table,
                    start=start,
                    stop=stop,
                    capacity_bytes=kind.capacity_bytes,
                    limit=self.num_blocks,
                )
                if in_flight == 0:
                    continue
                forward, backward = table.times_s(start, stop)
                costs.forward_s[start, stop] = forward
                costs.backward_s[start, stop] = backward
                costs.in_flight[start, stop] = in_flight
                costs.optimizer_s[start, stop] = self.model.optimizer_s(
                    kind.device_type, 1, start, stop
                )
        return costs

    def one_way_s(self, source: int, target: int, micro_batch_size: int) -> float:
        """Boundary transfer over the fastest connection of two kinds; infinite: none [s]."""
        key = (source, target, micro_batch_size)
        if key not in self._one_way:
            time_s = self.network.best_transfer_s(
                self.kinds[source].device_type,
                self.kinds[target].device_type,
                self.model.profile.model.boundary_bytes_per_sample * micro_batch_size,
            )
            self._one_way[key] = float("inf") if time_s is None else time_s
        return self._one_way[key]

    def hops(self, micro_batch_size: int) -> Floats:
        """Both ways over the boundary below a stage of kind k to one of kind j, by [k, j] [s]."""
        if micro_batch_size not in self._hops:
            num_kinds = range(len(self.kinds))
            self._hops[micro_batch_size] = np.array(
                [
                    [
                        self.one_way_s(k, j, micro_batch_size)
                        + self.one_way_s(j, k, micro_batch_size)
                        for j in num_kinds
                    ]
                    for k in num_kinds
                ]
            )
        return self._hops[micro_batch_size]

    def seconds_a_sample(self, kind: int) -> float:
        """Time of the whole model on one device of a kind, memory aside, at its best [s]."""
        tables, device_type = self.model.tables, self.kinds[kind].device_type
        return min(
            sum(tables.table(device_type, 1, b).times_s(0, self.num_blocks)) / b
            for b in self.micro_batch_sizes
            if tables.has(device_type, 1, b)
        )

    # --- One template ------------------------------------------------------------------------

    def times(self, template: Template) -> PipelineTimes:
        """Durations of a template over the fastest links: no placement of it is faster."""
        times = self._times.get(template)
        if times is None:
            times = self._times[template] = self._make_times(template)
        return times

    def _make_times(self, template: Template) -> PipelineTimes:
        size = template.micro_batch_size
        stages = template.stages
        costs = [self.costs(s.kind, size) for s in stages]
        pairs = list(itertools.pairwise(stages))
        return PipelineTimes(
            tuple(float(c.forward_s[s.start, s.stop]) for c, s in zip(costs, stages, strict=True)),
            tuple(float(c.backward_s[s.start, s.stop]) for c, s in zip(costs, stages, strict=True)),
            tuple(self.one_way_s(a.kind, b.kind, size) for a, b in pairs),
            tuple(self.one_way_s(b.kind, a.kind, size) for a, b in pairs),
        )

    def time_s(self, template: Template, micro_batches: int) -> float:
        """End of the last backward over the fastest links [s]."""
        return run_pipeline(self.times(template), micro_batches).end_s

    def optimizer_s(self, template: Template) -> float:
        """Longest optimizer update of a template's stages [s]."""
        return max(
            float(self.costs(s.kind, template.micro_batch_size).optimizer_s[s.start, s.stop])
            for s in template.stages
        )

    def max_micro_batches(self, template: Template) -> int:
        """Most micro-batches that a template has memory for, at most the whole batch; 0: none.

        A stage with room for fewer in flight than its place asks of it, P - s, still runs when
        the pipeline gets no more micro-batches than that.
        """
        most = self.global_batch_size // template.micro_batch_size
        num_stages = len(template.stages)
        for s, stage in enumerate(template.stages):
            room = int(
                self.costs(stage.kind, template.micro_batch_size).in_flight[stage.start, stage.stop]
            )
            if room < num_in_flight(s, num_stages=num_stages, num_micro_batches=most):
                most = room
        return most

    @cached_property
    def sync_floor_s(self) -> float:
        """Gradient sync that no plan of two or more pipelines can hide [s].

        Every pipeline's first stage holds block 0, whose gradients are complete only when the
        pipeline ends; its bucket has n >= 2 owners. The bucket of a weight tied to block 0 comes
        after it, over n to 2n. No ring is faster than over the fastest link for every hop.
        """
        profiled = self.model.profile.model
        tied_groups = sum(0 in group for group in profiled.tied_blocks)
        untied = profiled.parameters[0] - tied_groups * profiled.tied_parameters
        most = sum(self.counts)
        first = [self._best_ring_s(untied, n) for n in range(2, most + 1)]
        tied = [
            self._best_ring_s(profiled.tied_parameters, n)
            for n in range(2, 2 * most + 1)
            if tied_groups
        ]
        return min(first, default=0.0) + tied_groups * min(tied, default=0.0)

    def _best_ring_s(self, num_parameters: int, num_owners: int) -> float:
        """An all-reduce over the fastest link between any two devices, as every hop [s]."""
        if num_parameters <= 0 or num_owners < 2:
            return 0.0
        chunk = num_parameters * GRADIENT_BYTES / num_owners
        names = [kind.device_type for kind in self.kinds]
        times = [self.network.best_transfer_s(a, b, chunk) for a in names for b in names]
        return 2 * (num_owners - 1) * min((t for t in times if t is not None), default=0.0)
