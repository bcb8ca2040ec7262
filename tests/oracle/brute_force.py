"""Every plan of a small problem, judged by the simulator; written apart from the search.

Works on places (node, type): devices of one type in one node are alike, nothing else is assumed to
be. Plans are built pipeline by pipeline. Two rules leave plans out, both exact: a plan is not
faster than any of its pipelines alone, nor than the best that the places left can do with the
samples left; and a plan of several pipelines ends with a sync of block 0 over at least two devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from eth_cli.cluster import Cluster, Device
from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.profile.table import Profile
from eth_cli.search.simulate import simulate

Place = tuple[str, str]
Used = tuple[int, ...]
"""Devices by place."""
INFINITE = float("inf")


class Line(NamedTuple):
    """One pipeline with its share."""

    places: tuple[Place, ...]
    cuts: tuple[tuple[int, int], ...]
    size: int
    micro_batches: int
    used: Used
    alone_s: float
    """Its time without any other pipeline."""


class BruteForce:
    """The least step time of any plan; infinite: no plan fits."""

    def __init__(self, cluster: Cluster, profile: Profile, total: int) -> None:
        self.cluster, self.profile, self.total = cluster, profile, total
        self.places: dict[Place, list[str]] = {}
        for device in cluster.devices.values():
            self.places.setdefault((device.node, device.type), []).append(device.id)
        self.counts: Used = tuple(len(ids) for ids in self.places.values())
        self.best_s = INFINITE
        self.num_simulated = 0

    def run(self) -> float:
        lines = [line for line in self._lines() if line.alone_s < self.best_s]
        floor = self._sync_floor_s()
        groups: dict[tuple[Used, int], list[Line]] = {}
        for line in sorted(lines, key=lambda line: line.alone_s):
            groups.setdefault((line.used, line.size * line.micro_batches), []).append(line)

        @cache
        def fastest(left: Used, samples: int) -> float:
            """Least time in which the places left can do the samples left."""
            if samples == 0:
                return 0.0
            return min(
                (
                    max(members[0].alone_s, fastest(minus(left, used), samples - own))
                    for (used, own), members in groups.items()
                    if own <= samples and min(minus(left, used)) >= 0
                ),
                default=INFINITE,
            )

        ordered = list(groups.items())

        def extend(first: int, chosen: list[Line], left: Used, samples: int) -> None:
            if samples == 0:
                if len(chosen) > 1:
                    self._offer(chosen)
                return
            for index in range(first, len(ordered)):
                (used, own), members = ordered[index]
                rest = minus(left, used)
                if own > samples or min(rest) < 0:
                    continue
                if fastest(rest, samples - own) + floor >= self.best_s:
                    continue
                for line in members:
                    if line.alone_s + floor >= self.best_s:
                        break
                    if chosen and chosen[-1].used == used and line < chosen[-1]:
                        continue  # the same set in another order
                    extend(index, [*chosen, line], rest, samples - own)

        extend(0, [], self.counts, self.total)
        return self.best_s

    def _lines(self) -> Iterator[Line]:
        """All pipelines with all shares that fit; those with the whole batch are plans."""
        num_blocks = self.profile.model.num_blocks
        names = list(self.places)
        for length in range(1, min(sum(self.counts), num_blocks) + 1):
            for order in itertools.product(range(len(names)), repeat=length):
                used = Counter(order)
                vector = tuple(used[p] for p in range(len(names)))
                if min(minus(self.counts, vector)) < 0:
                    continue
                places = tuple(names[p] for p in order)
                for inner in itertools.combinations(range(1, num_blocks), length - 1):
                    cuts = tuple(itertools.pairwise((0, *inner, num_blocks)))
                    for size in self.profile.micro_batch_sizes:
                        for m in range(self.total // size, 0, -1):
                            if not self._fits(places, cuts, size, m):
                                continue
                            if self._least_s(places, cuts, size, m) >= self.best_s:
                                continue
                            line = Line(places, cuts, size, m, vector, 0.0)
                            alone_s = self._alone_s(line)
                            if m * size == self.total:
                                self.best_s = min(self.best_s, self._simulate([line]))
                            yield line._replace(alone_s=alone_s)

    def _entry(self, place: Place, block: int, size: int) -> tuple[float, float, int]:
        entry = self.profile.lookup(
            place[1], self.profile.model.kinds[block], tensor_parallel=1, micro_batch_size=size
        )
        assert entry is not None
        return entry.forward_s, entry.backward_s, entry.activation_bytes

    def _fits(
        self, places: tuple[Place, ...], cuts: tuple[tuple[int, int], ...], size: int, m: int
    ) -> bool:
        model = self.profile.model
        for s, (place, (start, stop)) in enumerate(zip(places, cuts, strict=True)):
            parameters = sum(model.parameters[start:stop])
            for group in model.tied_blocks:
                if sum(start <= block < stop for block in group) > 1:
                    parameters -= model.tied_parameters
            activations = sum(self._entry(place, b, size)[2] for b in range(start, stop))
            neighbours = (s > 0) + (s + 1 < len(places))
            needed = (
                16 * parameters
                + activations * min(m, len(places) - s)
                + 2 * neighbours * model.boundary_bytes_per_sample * size
                + self.profile.process_bytes(place[1])
            )
            if needed > self.cluster.device_types[place[1]].memory_bytes:
                return False
        return True

    def _least_s(
        self, places: tuple[Place, ...], cuts: tuple[tuple[int, int], ...], size: int, m: int
    ) -> float:
        """Every stage's work for all micro-batches, and what comes before and after it for one."""
        least = before = 0.0
        for place, (start, stop) in zip(places, cuts, strict=True):
            work = sum(sum(self._entry(place, b, size)[:2]) for b in range(start, stop))
            least = max(least, before + m * work)
            before += work
        return least * (1 - 1e-12)

    def _alone_s(self, line: Line) -> float:
        """End of the last backward by hand: forwards and backwards in 1F1B order, in turns."""
        num_stages, m = len(line.places), line.micro_batches
        times = [
            [sum(self._entry(p, b, line.size)[part] for b in range(start, stop)) for part in (0, 1)]
            for p, (start, stop) in zip(line.places, line.cuts, strict=True)
        ]
        devices = self._devices(line)
        num_bytes = self.profile.model.boundary_bytes_per_sample * line.size
        orders = []
        for s in range(num_stages):
            ahead = min(m, num_stages - s)
            order = [("F", k) for k in range(ahead)]
            for k in range(m):
                order.append(("B", k))
                if k + ahead < m:
                    order.append(("F", k + ahead))
            orders.append(order)
        done: dict[tuple[str, int, int], float] = {}
        free = [0.0] * num_stages
        link_free: dict[tuple[str, int], float] = {}
        while any(orders):
            for s, order in enumerate(orders):
                while order:
                    what, k = order[0]
                    arrived = done.get(
                        (what, s, k), 0.0 if self._is_source(what, s, num_stages) else None
                    )
                    if arrived is None:
                        break
                    order.pop(0)
                    free[s] = max(free[s], arrived) + times[s][what == "B"]
                    to = s + 1 if what == "F" else s - 1
                    if 0 <= to < num_stages:
                        begin = max(free[s], link_free.get((what, s), 0.0))
                        end = begin + self._transfer_s(devices[s], devices[to], num_bytes)
                        link_free[what, s] = done[what, to, k] = end
                    elif what == "F":
                        done["B", s, k] = free[s]
        return max(free)

    def _is_source(self, what: str, s: int, num_stages: int) -> bool:
        return s == 0 if what == "F" else s == num_stages - 1

    def _transfer_s(self, source: Device, target: Device, num_bytes: float) -> float:
        """One transfer at a time over the link as the files give it."""
        pair = frozenset((source.node, target.node))
        if all(frozenset(o.between) != pair for o in self.cluster.network.overrides):
            scope = "intra_node" if source.node == target.node else "inter_node"
            for ends in ((source.type, target.type), (target.type, source.type)):
                for entry in self.profile.links:
                    if (entry.scope, entry.devices, entry.flows) == (scope, ends, 1):
                        return entry.transfer_s(num_bytes)
        link = self.cluster.link(source, target)
        return link.latency_s + num_bytes / link.bandwidth_bytes_per_s

    def _sync_floor_s(self) -> float:
        """No all-reduce of block 0 over two or more devices is faster."""
        model = self.profile.model
        tied = sum(0 in group for group in model.tied_blocks) * model.tied_parameters
        num_bytes = 4 * (model.parameters[0] - tied)
        devices = list(self.cluster.devices.values())
        least = INFINITE
        for n in range(2, len(devices) + 1):
            for a, b in itertools.permutations(devices, 2):
                least = min(least, 2 * (n - 1) * self._transfer_s(a, b, num_bytes / n))
        return 0.0 if least == INFINITE else least * (1 - 1e-9)

    def _devices(self, *lines: Line) -> list[Device]:
        free = {place: list(ids) for place, ids in self.places.items()}
        return [self.cluster.devices[free[p].pop(0)] for line in lines for p in line.places]

    def _offer(self, chosen: list[Line]) -> None:
        self.best_s = min(self.best_s, self._simulate(chosen))

    def _simulate(self, chosen: list[Line]) -> float:
        self.num_simulated += 1
        devices = iter(self._devices(*chosen))
        plan = Plan(
            schema_version=1,
            model=self.profile.model.name,
            seq_len=self.profile.seq_len,
            dtype=self.profile.dtype,
            global_batch_size=self.total,
            pipelines=tuple(
                Pipeline(
                    micro_batches=line.micro_batches,
                    micro_batch_size=line.size,
                    stages=tuple(
                        Stage(blocks=cut, devices=(next(devices).id,)) for cut in line.cuts
                    ),
                )
                for line in chosen
            ),
        )
        return simulate(plan, self.profile, self.cluster).step_time_s


def minus(counts: Used, used: Used) -> Used:
    """Devices left by place."""
    return tuple(n - u for n, u in zip(counts, used, strict=True))
