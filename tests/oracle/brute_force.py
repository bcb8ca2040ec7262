"""Every plan of a small problem, judged by the simulator; written apart from the search.

Devices of one type in one node are alike, nothing else is assumed to be. Pipelines are listed over
types first: every order of (type, tensor-parallel width, recomputation), every cut, micro-batch
size and share. Sets of them that together do the batch are then put on nodes in every way.

Rules that leave plans out, all exact: a plan is not faster than any of its pipelines alone over
the fastest links, nor than the best that the devices left can do with the samples left; a plan of
several pipelines ends with a sync of block 0 over its real owners; two plans that differ only in
the names of nodes alike take the same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from eth_cli.cluster import Cluster, Device
from eth_cli.profile.table import Profile
from eth_cli.search.comm import all_reduce_s
from eth_cli.search.cost import CostModel
from eth_cli.search.placed import PlacedPipeline, PlacedStage

INFINITE = float("inf")
BELOW = 1 - 1e-12
"""What is not smaller than this part of the best is no better, rounding left aside."""

Used = tuple[int, ...]
"""Devices by type."""
Fastest = Callable[[Used, int], float]


class Make(NamedTuple):
    """What a stage is made of."""

    type_index: int
    width: int
    recompute: bool


class Line(NamedTuple):
    """One pipeline over types, with its share."""

    makes: tuple[Make, ...]
    cuts: tuple[tuple[int, int], ...]
    size: int
    micro_batches: int
    used: Used
    low_s: float
    """It takes no less: the last backward over the fastest links, and its own optimizer [s]."""

    @property
    def samples(self) -> int:
        return self.size * self.micro_batches


class BlockCosts(NamedTuple):
    """Costs of every block at one (type, width, micro-batch size)."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...] | None
    """Kept under recomputation; None: the profile does not say."""


@lru_cache(maxsize=4096)
def one_f_one_b_steps(num_stages: int, m: int) -> tuple[tuple[int, bool, int], ...]:
    """(stage, is it a forward, micro-batch) in an order in which inputs come before their use."""
    orders = []
    for s in range(num_stages):
        ahead = min(m, num_stages - s)
        order = [(True, k) for k in range(ahead)]
        for k in range(m):
            order.append((False, k))
            if k + ahead < m:
                order.append((True, k + ahead))
        orders.append(order)
    done: set[tuple[int, bool, int]] = set()
    steps = []
    while any(orders):
        for s, order in enumerate(orders):
            while order:
                is_forward, k = order[0]
                source = s - 1 if is_forward else s + 1
                if 0 <= source < num_stages and (source, is_forward, k) not in done:
                    break
                order.pop(0)
                done.add((s, is_forward, k))
                steps.append((s, is_forward, k))
    return tuple(steps)


@lru_cache(maxsize=500_000)
def pipeline_end_s(
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    down_s: tuple[float, ...],
    up_s: tuple[float, ...],
    m: int,
) -> float:
    """End of the last backward; a boundary carries one transfer at a time in each direction [s]."""
    num_stages = len(forward_s)
    free = [0.0] * num_stages
    down_free = [0.0] * num_stages
    up_free = [0.0] * num_stages
    arrived_down = [[0.0] * m for _ in range(num_stages + 1)]
    arrived_up = [[0.0] * m for _ in range(num_stages + 1)]
    for s, is_forward, k in one_f_one_b_steps(num_stages, m):
        if is_forward:
            end = max(free[s], arrived_down[s][k]) + forward_s[s]
            if s + 1 < num_stages:
                down_free[s] = max(end, down_free[s]) + down_s[s]
                arrived_down[s + 1][k] = down_free[s]
        else:
            end = max(free[s], arrived_up[s][k]) + backward_s[s]
            if s > 0:
                up_free[s] = max(end, up_free[s]) + up_s[s - 1]
                arrived_up[s - 1][k] = up_free[s]
        free[s] = end
    return max(free)


class BruteForce:
    """The least step time of any plan; infinite: no plan fits.

    Args:
        cutoff_s: the step time of a plan that is known; `run` gives this or what is below it.
        spare_recompute: whether stages that fit without recomputation are listed with it too.
            It costs them time and gives nothing but memory; False where listing takes too long.
    """

    def __init__(
        self,
        cluster: Cluster,
        profile: Profile,
        total: int,
        *,
        cutoff_s: float = INFINITE,
        spare_recompute: bool = True,
        sharded_optimizer: bool = False,
    ) -> None:
        self.cluster, self.profile, self.total = cluster, profile, total
        self.model = CostModel(profile, cluster)
        self.best_s = cutoff_s
        self.best: tuple[PlacedPipeline, ...] | None = None
        """The plan, where one is better than the cutoff."""
        self.spare_recompute = spare_recompute
        self.sharded = sharded_optimizer
        self.num_evaluated = 0
        self.types = sorted({d.type for d in cluster.devices.values()})
        self.free: dict[tuple[str, int], list[Device]] = {}
        for device in cluster.devices.values():
            key = (device.node, self.types.index(device.type))
            self.free.setdefault(key, []).append(device)
        self.counts: Used = tuple(
            sum(d.type == t for d in cluster.devices.values()) for t in self.types
        )
        self.num_blocks = profile.model.num_blocks
        self._costs: dict[tuple[int, int, int], BlockCosts | None] = {}
        self._rooms: dict[tuple[int, int, int, int, int, bool], int] = {}
        self._times: dict[tuple[Make, tuple[int, int], int], tuple[float, float]] = {}
        self._hops: dict[tuple[int, int, int, int], float] = {}
        self._rings: dict[object, float] = {}
        self.alike = self._nodes_alike()

    def run(self) -> float:
        """The least step time [s]."""
        if not self.sharded:
            self._search(range(1, sum(self.counts) + 1), 1)
            return self.best_s
        for num_pipelines in range(1, sum(self.counts) + 1):
            self._search((num_pipelines,), num_pipelines)
        return self.best_s

    # --- Pipelines over types ----------------------------------------------------------------

    def _search(self, numbers: range | tuple[int, ...], parts: int) -> None:
        """All sets of so many pipelines, the optimizer state split in so many parts."""
        self.parts = parts
        self._rooms.clear()
        self.floor_s = self._sync_floor_s()
        lines = list(self._lines())
        # Twice: first by a bound that costs little, then by the exact time of what is left.
        lines = self._completable(lines)
        lines = [line._replace(low_s=self._low_s(line)) for line in lines]
        lines = self._completable(lines)
        ordered = list(by_use(lines).items())
        fastest = self._fastest(lines)

        def extend(first: int, chosen: list[Line], left: Used, samples: int) -> None:
            if samples == 0:
                if len(chosen) in numbers:
                    self._place(chosen)
                return
            for index in range(first, len(ordered)):
                (used, own), members = ordered[index]
                rest = minus(left, used)
                if own > samples or min(rest) < 0:
                    continue
                sync_s = self.floor_s if chosen or own < samples else 0.0
                if self._is_beaten(fastest(rest, samples - own) + sync_s):
                    continue
                for line in members:
                    if self._is_beaten(line.low_s + sync_s):
                        break
                    if chosen and index == first and line < chosen[-1]:
                        continue  # the same set in another order
                    extend(index, [*chosen, line], rest, samples - own)

        extend(0, [], self.counts, self.total)

    def _is_beaten(self, time_s: float) -> bool:
        return time_s >= self.best_s * BELOW

    def _fastest(self, lines: list[Line]) -> Fastest:
        """Least time in which devices can do so many samples; infinite: not at all."""
        least: dict[tuple[Used, int], float] = {}
        for line in lines:
            key = (line.used, line.samples)
            least[key] = min(least.get(key, INFINITE), line.low_s)

        @cache
        def fastest(left: Used, samples: int) -> float:
            if samples == 0:
                return 0.0
            return min(
                (
                    max(low_s, fastest(minus(left, used), samples - own))
                    for (used, own), low_s in least.items()
                    if own <= samples and min(minus(left, used)) >= 0
                ),
                default=INFINITE,
            )

        return fastest

    def _completable(self, lines: list[Line]) -> list[Line]:
        """Those that are part of any set that may be better than the best."""
        fastest = self._fastest(lines)
        return [
            line
            for line in lines
            if not self._is_beaten(
                max(line.low_s, fastest(minus(self.counts, line.used), self.total - line.samples))
                + (self.floor_s if line.samples < self.total else 0.0)
            )
        ]

    def _lines(self) -> Iterator[Line]:
        """All pipelines with all shares that fit, with a bound that costs little."""
        for size in self.profile.micro_batch_sizes:
            for num_stages in range(1, min(sum(self.counts), self.num_blocks) + 1):
                yield from self._extended(size, num_stages, (), (), self.counts, self.total // size)

    def _extended(
        self,
        size: int,
        num_stages: int,
        makes: tuple[Make, ...],
        cuts: tuple[tuple[int, int], ...],
        left: Used,
        most: int,
    ) -> Iterator[Line]:
        """Pipelines that begin with these stages and have memory for at most so many batches."""
        s, start = len(makes), cuts[-1][1] if cuts else 0
        if s == num_stages:
            used = minus(self.counts, left)
            for m in range(1, most + 1):
                low_s = self._work_s(makes, cuts, size, m)
                if self._is_beaten(low_s):
                    break
                yield Line(makes, cuts, size, m, used, low_s)
            return
        is_last = s == num_stages - 1
        stops = (
            (self.num_blocks,)
            if is_last
            else range(start + 1, self.num_blocks - num_stages + s + 2)
        )
        for index, width in itertools.product(range(len(self.types)), (1, 2, 3, 4)):
            costs = self.costs(index, width, size)
            if costs is None or left[index] < width:
                continue
            rest = tuple(n - width * (k == index) for k, n in enumerate(left))
            for stop in stops:
                plain = self._room(index, width, size, start, stop, recompute=False)
                for recompute in (False, True):
                    if recompute and costs.kept_bytes is None:
                        continue
                    if (
                        recompute
                        and not self.spare_recompute
                        and plain >= min(most, num_stages - s)
                    ):
                        continue
                    room = (
                        self._room(index, width, size, start, stop, recompute=True)
                        if recompute
                        else plain
                    )
                    # The stage holds min(m, num_stages - s) micro-batches at once.
                    enough = most if room >= num_stages - s else min(most, room)
                    if enough > 0:
                        yield from self._extended(
                            size,
                            num_stages,
                            (*makes, Make(index, width, recompute)),
                            (*cuts, (start, stop)),
                            rest,
                            enough,
                        )

    def costs(self, type_index: int, width: int, size: int) -> BlockCosts | None:
        """Costs of all blocks; None: the profile lacks one of them."""
        key = (type_index, width, size)
        if key not in self._costs:
            entries = [
                self.profile.lookup(
                    self.types[type_index], kind, tensor_parallel=width, micro_batch_size=size
                )
                for kind in self.profile.model.kinds
            ]
            found = [entry for entry in entries if entry is not None]
            kept = [e.recompute_activation_bytes for e in found]
            self._costs[key] = (
                BlockCosts(
                    tuple(e.forward_s for e in found),
                    tuple(e.backward_s for e in found),
                    tuple(e.activation_bytes for e in found),
                    None if None in kept else tuple(b for b in kept if b is not None),
                )
                if len(found) == len(entries)
                else None
            )
        return self._costs[key]

    def _room(
        self, index: int, width: int, size: int, start: int, stop: int, *, recompute: bool
    ) -> int:
        """Micro-batches that a device of the stage has memory for at once."""
        key = (index, width, size, start, stop, recompute)
        if key not in self._rooms:
            self._rooms[key] = self._count_room(index, width, size, start, stop, recompute)
        return self._rooms[key]

    def _count_room(
        self, index: int, width: int, size: int, start: int, stop: int, recompute: bool
    ) -> int:
        costs = self.costs(index, width, size)
        assert costs is not None
        model, memory = self.profile.model, self.profile.memory
        parameters = sum(model.parameters[start:stop])
        for group in model.tied_blocks:
            uses = sum(start <= block < stop for block in group)
            parameters -= max(0, uses - 1) * model.tied_parameters
        rate = memory.bytes_per_parameter
        if self.parts > 1:
            rate -= (memory.optimizer_bytes_per_parameter or 0.0) * (1 - 1 / self.parts)
        neighbours = (start > 0) + (stop < model.num_blocks)
        free = (
            self.cluster.device_types[self.types[index]].memory_bytes
            - math.ceil(math.ceil(parameters / width) * rate)
            - 2 * neighbours * model.boundary_bytes_per_sample * size
            - self.profile.process_bytes(self.types[index])
        )
        each = sum(costs.activation_bytes[start:stop])
        if recompute:
            assert costs.kept_bytes is not None
            free -= max(costs.activation_bytes[start:stop])
            each = sum(costs.kept_bytes[start:stop])
        if free < 0:
            return 0
        return free // each if each else 10**9

    def _stage_times(self, make: Make, cut: tuple[int, int], size: int) -> tuple[float, float]:
        key = (make, cut, size)
        if key not in self._times:
            costs = self.costs(make.type_index, make.width, size)
            assert costs is not None
            forward_s = sum(costs.forward_s[slice(*cut)])
            backward_s = sum(costs.backward_s[slice(*cut)])
            self._times[key] = (forward_s, backward_s + forward_s * make.recompute)
        return self._times[key]

    def _work_s(
        self, makes: tuple[Make, ...], cuts: tuple[tuple[int, int], ...], size: int, m: int
    ) -> float:
        """Every stage's work for all micro-batches, and what comes before and after it for one."""
        least = before = 0.0
        for s, (make, cut) in enumerate(zip(makes, cuts, strict=True)):
            if s > 0:
                before += self._hop_s(makes[s - 1], make, size) + self._hop_s(
                    make, makes[s - 1], size
                )
            work = sum(self._stage_times(make, cut, size))
            least = max(least, before + m * work)
            before += work
        return least * (1 - 1e-12)

    def _hop_s(self, source: Make, target: Make, size: int) -> float:
        """One transfer over the fastest connection between two groups [s]."""
        key = (source.type_index, target.type_index, target.width, size)
        if key not in self._hops:
            ends = [
                [devices for (_, index), devices in self.free.items() if index == make.type_index]
                for make in (source, target)
            ]
            self._hops[key] = min(
                (
                    self._transfer_s(a[0], b[-1], size, target.width)
                    for a in ends[0]
                    for b in ends[1]
                    if a[0] != b[-1]
                ),
                default=INFINITE,
            )
        return self._hops[key]

    def _transfer_s(self, source: Device, target: Device, size: int, flows: int) -> float:
        """Every device of the target's group gets the whole tensor at once [s]."""
        num_bytes = self.profile.model.boundary_bytes_per_sample * size
        return self.model.network.transfer_s(source, target, num_bytes, flows=flows)

    def _low_s(self, line: Line) -> float:
        pairs = list(itertools.pairwise(line.makes))
        down = tuple(self._hop_s(a, b, line.size) for a, b in pairs)
        up = tuple(self._hop_s(b, a, line.size) for a, b in pairs)
        return (self._end_s(line, down, up) + self._optimizer_s(line)) * (1 - 1e-12)

    def _end_s(self, line: Line, down: tuple[float, ...], up: tuple[float, ...]) -> float:
        times = [
            self._stage_times(make, cut, line.size)
            for make, cut in zip(line.makes, line.cuts, strict=True)
        ]
        return pipeline_end_s(
            tuple(forward for forward, _ in times),
            tuple(backward for _, backward in times),
            down,
            up,
            line.micro_batches,
        )

    def _optimizer_s(self, line: Line) -> float:
        """The longest update of the line's stages [s]."""
        return max(
            self.profile.model.stage_parameters(*cut)
            / make.width
            * self.profile.optimizer_s_per_parameter(self.types[make.type_index])
            / self.parts
            for make, cut in zip(line.makes, line.cuts, strict=True)
        )

    def _sync_floor_s(self) -> float:
        """No all-reduce of block 0 over two or more groups is faster [s]."""
        model = self.profile.model
        tied = sum(0 in group for group in model.tied_blocks) * model.tied_parameters
        num_bytes = 4 * (model.parameters[0] - tied)
        devices = list(self.cluster.devices.values())
        widths = {entry.tensor_parallel for entry in self.profile.compute}
        return (1 - 1e-9) * min(
            (
                2
                * (n - 1)
                * self.model.network.transfer_s(a, b, num_bytes / n / width, flows=width)
                for n in range(2, len(devices) + 1)
                for a, b in itertools.permutations(devices, 2)
                for width in widths
            ),
            default=0.0,
        )

    # --- Placements ----------------------------------------------------------------------------

    def _nodes_alike(self) -> dict[str, int]:
        """A number for every node: nodes of one number may change places with each other."""
        names = [node.name for node in self.cluster.nodes]
        classes: dict[str, int] = {}
        for at, name in enumerate(names):
            same = (classes[o] for o in names[:at] if self._may_swap(name, o))
            classes[name] = next(same, at)
        return classes

    def _may_swap(self, one: str, other: str) -> bool:
        def devices(node: str) -> list[int]:
            return [len(self.free.get((node, t), ())) for t in range(len(self.types))]

        if devices(one) != devices(other):
            return False
        swap = {one: other, other: one}
        links = {frozenset(o.between): o.link for o in self.cluster.network.overrides}
        renamed = {
            frozenset(swap.get(node, node) for node in between): link
            for between, link in links.items()
        }
        return renamed == links

    def _place(self, lines: list[Line]) -> None:
        """Every way to put a set of pipelines on nodes."""
        optimizer_s = max(self._optimizer_s(line) for line in lines)
        sync_s = self.floor_s if len(lines) > 1 else 0.0
        taken = dict.fromkeys(self.free, 0)
        touched = dict.fromkeys(self.alike, 0)

        def next_line(placed: list[PlacedPipeline], end_s: float) -> None:
            if len(placed) == len(lines):
                self._offer(placed, end_s, optimizer_s)
                return
            next_stage(placed, [], end_s)

        def next_stage(
            placed: list[PlacedPipeline], groups: list[tuple[Device, ...]], end_s: float
        ) -> None:
            line = lines[len(placed)]
            if len(groups) == len(line.makes):
                hops = [
                    (
                        self._transfer_s(a[0], b[0], line.size, len(b)),
                        self._transfer_s(b[0], a[0], line.size, len(a)),
                    )
                    for a, b in itertools.pairwise(groups)
                ]
                own_s = self._end_s(line, tuple(d for d, _ in hops), tuple(u for _, u in hops))
                end_s = max(end_s, own_s)
                if not self._is_beaten((end_s + optimizer_s + sync_s) * (1 - 1e-12)):
                    next_line([*placed, placed_line(line, groups)], end_s)
                return
            make = line.makes[len(groups)]
            fresh: set[int] = set()
            for node, number in self.alike.items():
                key = (node, make.type_index)
                if key not in self.free or len(self.free[key]) - taken[key] < make.width:
                    continue
                if not touched[node]:
                    # Of nodes alike that nothing is on yet, the first one stands for all.
                    if number in fresh:
                        continue
                    fresh.add(number)
                group = tuple(self.free[key][taken[key] : taken[key] + make.width])
                taken[key] += make.width
                touched[node] += 1
                next_stage(placed, [*groups, group], end_s)
                taken[key] -= make.width
                touched[node] -= 1

        next_line([], 0.0)

    def _offer(self, placed: list[PlacedPipeline], end_s: float, optimizer_s: float) -> None:
        if len(placed) > 1:
            end_s += self._last_sync_s(placed)
        if self._is_beaten((end_s + optimizer_s) * (1 - 1e-12)):
            return
        self.num_evaluated += 1
        evaluation = self.model.evaluate(placed, sharded_optimizer=self.sharded)
        if evaluation.step_time_s < self.best_s:
            self.best_s, self.best = evaluation.step_time_s, tuple(placed)

    def _last_sync_s(self, placed: list[PlacedPipeline]) -> float:
        """The all-reduce of the first segment: it starts when all pipelines have ended [s]."""
        model = self.profile.model
        stop = min(pipeline.stages[0].stop for pipeline in placed)
        groups = tuple(pipeline.stages[0].devices for pipeline in placed)
        key = (stop, groups)
        if key not in self._rings:
            tied = sum(b < stop for group in model.tied_blocks for b in group)
            parameters = sum(model.parameters[:stop]) - tied * model.tied_parameters
            ring = self.model.network.ring(groups)
            self._rings[key] = all_reduce_s(ring, 4 * parameters)
        return self._rings[key]


def placed_line(line: Line, groups: list[tuple[Device, ...]]) -> PlacedPipeline:
    """A pipeline on its devices."""
    return PlacedPipeline(
        line.size,
        line.micro_batches,
        tuple(
            PlacedStage(*cut, group, make.recompute)
            for make, cut, group in zip(line.makes, line.cuts, groups, strict=True)
        ),
    )


def by_use(lines: list[Line]) -> dict[tuple[Used, int], list[Line]]:
    """Pipelines by the devices that they take and the samples that they do, fastest first."""
    groups: dict[tuple[Used, int], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.low_s):
        groups.setdefault((line.used, line.samples), []).append(line)
    return groups


def minus(counts: Used, used: Used) -> Used:
    """Devices left by type."""
    return tuple(n - u for n, u in zip(counts, used, strict=True))
