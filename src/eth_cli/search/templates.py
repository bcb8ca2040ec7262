"""Templates: pipelines over kinds of interchangeable devices, never over device identities.

A `Problem` holds what a search is about; a `Template` is one way to cut the model over an ordered
list of device kinds. `docs/search.md` derives the formulas. Cuts, bounds and capacities of whole
families of templates are in `capacity`, placement on real devices in `place`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.buckets import GRADIENT_BYTES
from eth_cli.schedule import num_in_flight
from eth_cli.search.comm import Network
from eth_cli.search.cost import CostModel
from eth_cli.search.memory import max_in_flight
from eth_cli.search.pruning import ALL_RULES, Pruning
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


class Option(NamedTuple):
    """What a stage may be made of: a group of devices of one kind, recomputing or not."""

    kind: int
    tensor_parallel: int = 1
    recompute: bool = False


class TemplateStage(NamedTuple):
    """Blocks ``[start, stop)`` on a group of devices of one kind."""

    kind: int
    start: int
    stop: int
    tensor_parallel: int = 1
    recompute: bool = False

    @property
    def option(self) -> Option:
        """What the stage is made of."""
        return Option(self.kind, self.tensor_parallel, self.recompute)


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
    """Costs of every possible stage of one option at one micro-batch size, by [start, stop]."""

    forward_s: Floats
    backward_s: Floats
    in_flight: Ints
    """Most micro-batches in flight that memory has room for; 0: the stage does not fit at all."""
    optimizer_s: Floats

    @property
    def work_s(self) -> Floats:
        """Forward + backward; infinite where there is no stage or it does not fit."""
        return self.forward_s + self.backward_s


class SearchOverError(Exception):
    """The time of a search is over. Whoever raises it has nothing to give; never shown."""


class Problem:
    """What a search is about: kinds of devices, micro-batch sizes, the batch, and their costs."""

    def __init__(
        self,
        model: CostModel,
        *,
        kinds: Sequence[Kind],
        micro_batch_sizes: Sequence[int],
        global_batch_size: int,
        tensor_parallel: Sequence[int] | None = None,
        recompute: bool = True,
        excluded: Collection[str] = (),
        pruning: Pruning = ALL_RULES,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            pruning: the rules by which candidates are left out.
            is_over: whether to end with what there is; every long loop of a search asks.
        """
        self.model = model
        self.is_over = is_over
        self.pruning = pruning
        self.kinds = tuple(kinds)
        self.micro_batch_sizes = tuple(micro_batch_sizes)
        self.global_batch_size = global_batch_size
        self.excluded = frozenset(excluded)
        self.num_blocks = model.profile.model.num_blocks
        self.in_nodes = self._in_nodes()
        """By kind: how many usable devices of it each node has that has any."""
        self.options = self._options(tensor_parallel, recompute)
        """What a stage may be made of, by kind, width and recomputation."""
        self._costs: dict[tuple[Option, int], StageCosts] = {}
        self._hops: dict[int, Floats] = {}
        self._one_way: dict[tuple[int, int, int, int], float] = {}
        self._times: dict[Template, PipelineTimes] = {}

    def check_over(self) -> None:
        """Raise SearchOverError where the time of the search is over."""
        if self.is_over():
            raise SearchOverError

    def _in_nodes(self) -> tuple[Counter[str], ...]:
        found: tuple[Counter[str], ...] = tuple(Counter() for _ in self.kinds)
        index = {kind.device_type: k for k, kind in enumerate(self.kinds)}
        for device in self.model.cluster.devices.values():
            if device.type in index and device.id not in self.excluded:
                found[index[device.type]][device.node] += 1
        return found

    @cached_property
    def largest_node(self) -> int:
        """Most usable devices of any node, all kinds together."""
        return max(sum(self.in_nodes, Counter[str]()).values(), default=0)

    def _options(self, widths: Sequence[int] | None, recompute: bool) -> tuple[Option, ...]:
        options = []
        tables = self.model.tables
        for k, kind in enumerate(self.kinds):
            for width in self.model.profile.widths(kind.device_type):
                if widths is not None and width not in widths:
                    continue
                if width > max(self.in_nodes[k].values(), default=0):
                    continue
                found = [
                    tables.table(kind.device_type, width, b)
                    for b in self.micro_batch_sizes
                    if tables.has(kind.device_type, width, b)
                ]
                if found:
                    options.append(Option(k, width))
                if recompute and any(table.can_recompute for table in found):
                    options.append(Option(k, width, recompute=True))
        return tuple(options)

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

    @cached_property
    def groups(self) -> dict[tuple[int, int], int]:
        """Most tensor-parallel groups of each (kind, width) that the nodes have room for at once.

        Widths of all options, and 1. A group lies in one node, so odd devices may be left over.
        """
        return {
            (k, width): sum(n // width for n in self.in_nodes[k].values())
            for k in range(len(self.kinds))
            for width in sorted({1, *(o.tensor_parallel for o in self.options if o.kind == k)})
        }

    def takes(self, option: Option) -> dict[tuple[int, int], int]:
        """What a stage of an option takes of `groups`: a wide group has room for narrower ones."""
        return {
            (kind, width): option.tensor_parallel // width
            for kind, width in self.groups
            if kind == option.kind and width <= option.tensor_parallel
        }

    def uses(self, template: Template) -> tuple[tuple[tuple[int, int], int], ...]:
        """What one pipeline of a template takes of `groups`."""
        found: Counter[tuple[int, int]] = Counter()
        for stage in template.stages:
            found.update(self.takes(stage.option))
        return tuple(sorted(found.items()))

    def plain(self, option: Option) -> int | None:
        """The index of a recomputing option's like without recomputation; None: there is none.

        Recomputation only costs time where the same stage has room for as much without it. None,
        too, where the rule that leaves such stages out is off: nobody asks for anything else.
        """
        if not self.pruning.recompute:
            return None
        other = option._replace(recompute=False)
        return self.options.index(other) if option.recompute and other in self.options else None

    def block_times_s(
        self, option: Option, block: int, micro_batch_size: int
    ) -> tuple[float, float]:
        """Forward and backward of one block, memory aside; infinite where the profile has none [s].

        A block that fits no device on its own, with buffers to both sides, may still be part of a
        stage at an end of the model, or of the whole model, which has fewer.
        """
        device_type, width = self.kinds[option.kind].device_type, option.tensor_parallel
        if not self.model.tables.has(device_type, width, micro_batch_size):
            return float("inf"), float("inf")
        table = self.model.tables.table(device_type, width, micro_batch_size)
        return table.times_s(block, block + 1, recompute=option.recompute)

    def block_s(self, option: Option, block: int, micro_batch_size: int) -> float:
        """Forward and backward of one block together, as `block_times_s` [s]."""
        return sum(self.block_times_s(option, block, micro_batch_size))

    def costs(self, option: Option, micro_batch_size: int) -> StageCosts:
        """Costs of all stages of an option; infinite where the profile has no entry."""
        key = (option, micro_batch_size)
        if key not in self._costs:
            self._costs[key] = self._make_costs(option, micro_batch_size)
        return self._costs[key]

    def _make_costs(self, option: Option, micro_batch_size: int) -> StageCosts:
        size = self.num_blocks + 1
        kind = self.kinds[option.kind]
        width = option.tensor_parallel
        tables = self.model.tables
        table = (
            tables.table(kind.device_type, width, micro_batch_size)
            if tables.has(kind.device_type, width, micro_batch_size)
            else None
        )
        if table is None or (option.recompute and not table.can_recompute):
            nothing = np.full((size, size), np.inf)
            return StageCosts(nothing, nothing, np.zeros((size, size), dtype=np.int64), nothing)
        classes, members = self._stage_classes
        values = np.full((4, len(members) + 1), np.inf)
        values[2] = 0
        for at, (start, stop) in enumerate(members):
            in_flight = max_in_flight(
                self.model.profile,
                table,
                start=start,
                stop=stop,
                capacity_bytes=kind.capacity_bytes,
                recompute=option.recompute,
                limit=self.num_blocks,
            )
            if in_flight:
                times = table.times_s(start, stop, recompute=option.recompute)
                update = self.model.optimizer_s(kind.device_type, width, start, stop)
                values[:, at] = *times, in_flight, update
        return StageCosts(
            values[0][classes],
            values[1][classes],
            values[2][classes].astype(np.int64),
            values[3][classes],
        )

    @cached_property
    def _stage_classes(self) -> tuple[Ints, list[tuple[int, int]]]:
        """Stages that cost the same: by [start, stop] a number, and a stage of every number.

        A model repeats one block many times, so classes are few. The last number is no stage.
        """
        profiled = self.model.profile.model
        blocks = list(zip(profiled.kinds, profiled.parameters, strict=True))
        found: dict[object, int] = {}
        members: list[tuple[int, int]] = []
        size = self.num_blocks + 1
        classes = np.full((size, size), -1, dtype=np.int64)
        for start in range(self.num_blocks):
            for stop in range(start + 1, size):
                tied = tuple(
                    sum(start <= block < stop for block in group) for group in profiled.tied_blocks
                )
                key = (tuple(blocks[start:stop]), start > 0, stop < self.num_blocks, tied)
                at = found.setdefault(key, len(members))
                if at == len(members):
                    members.append((start, stop))
                classes[start, stop] = at
        return classes, members

    def one_way_s(self, source: int, target: Option, micro_batch_size: int) -> float:
        """Boundary transfer from a kind to a stage over their fastest connection [s].

        No placement is faster; infinite where no two devices of the kinds are connected. Every
        device of the target's group gets the whole tensor, which shares the NIC between nodes.
        """
        key = (source, target.kind, target.tensor_parallel, micro_batch_size)
        if key not in self._one_way:
            time_s = self.network.best_transfer_s(
                self.kinds[source].device_type,
                self.kinds[target.kind].device_type,
                self.model.profile.model.boundary_bytes_per_sample * micro_batch_size,
                flows=target.tensor_parallel,
            )
            self._one_way[key] = float("inf") if time_s is None else time_s
        return self._one_way[key]

    def hops(self, micro_batch_size: int) -> Floats:
        """Both ways over the boundary below a stage of option o to one of p, by [o, p] [s]."""
        if micro_batch_size not in self._hops:
            self._hops[micro_batch_size] = np.array(
                [
                    [
                        self.one_way_s(o.kind, p, micro_batch_size)
                        + self.one_way_s(p.kind, o, micro_batch_size)
                        for p in self.options
                    ]
                    for o in self.options
                ]
            )
        return self._hops[micro_batch_size]

    def seconds_a_sample(self, kind: int) -> float:
        """Time of the whole model on one device of a kind, memory aside, at its best [s].

        For a kind that has wider groups only, the time of a group times its devices.
        """
        return min(
            sum(self.block_s(o, block, b) for block in range(self.num_blocks))
            * o.tensor_parallel
            / b
            for o in self.options
            for b in self.micro_batch_sizes
            if o.kind == kind and not o.recompute
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
        costs = [self.costs(s.option, size) for s in stages]
        pairs = list(itertools.pairwise(stages))
        return PipelineTimes(
            tuple(float(c.forward_s[s.start, s.stop]) for c, s in zip(costs, stages, strict=True)),
            tuple(float(c.backward_s[s.start, s.stop]) for c, s in zip(costs, stages, strict=True)),
            tuple(self.one_way_s(a.kind, b.option, size) for a, b in pairs),
            tuple(self.one_way_s(b.kind, a.option, size) for a, b in pairs),
        )

    def time_s(self, template: Template, micro_batches: int) -> float:
        """End of the last backward over the fastest links [s]."""
        return run_pipeline(self.times(template), micro_batches).end_s

    def optimizer_s(self, template: Template) -> float:
        """Longest optimizer update of a template's stages [s]."""
        return max(
            float(self.costs(s.option, template.micro_batch_size).optimizer_s[s.start, s.stop])
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
                self.costs(stage.option, template.micro_batch_size).in_flight[
                    stage.start, stage.stop
                ]
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
        first = [self.best_ring_s(untied, n) for n in range(2, most + 1)]
        tied = [
            self.best_ring_s(profiled.tied_parameters, n)
            for n in range(2, 2 * most + 1)
            if tied_groups
        ]
        return min(first, default=0.0) + tied_groups * min(tied, default=0.0)

    def best_ring_s(
        self, num_parameters: int, num_owners: int, *, across_nodes: bool = False
    ) -> float:
        """An all-reduce over the fastest link between any two devices, as every hop [s].

        Args:
            across_nodes: whether the owners are known to be in several nodes, so that a hop is too.
        """
        if num_parameters <= 0 or num_owners < 2:
            return 0.0
        num_bytes = num_parameters * GRADIENT_BYTES / num_owners
        names = [kind.device_type for kind in self.kinds]
        times = [
            self.network.best_transfer_s(
                a, b, num_bytes / width, flows=width, across_nodes=across_nodes
            )
            for a in names
            for b in names
            for width in {o.tensor_parallel for o in self.options}
        ]
        return 2 * (num_owners - 1) * min((t for t in times if t is not None), default=0.0)
