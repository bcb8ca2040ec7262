"""Step time and cost against how many devices are used: plans of parts of a cluster.

Nodes that hold the same devices form a group. From nothing, each round adds the next part of the
one group whose addition helps most, which a search for each of them tells, until the whole cluster
is reached. Every plan that was found on the way is a point. The number of searches is bounded:
where there are many groups, the parts are large and only the groups whose devices compute fastest
are tried in a round. So the frontier shows what is attainable, not that nothing else is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.economics import Cost, cost_of
from eth_cli.search.planner import SearchReport
from eth_cli.search.replan import Answer, Progress

MAX_SEARCHES = 16
"""Searches that a frontier takes at most, that of the whole cluster included."""

Search = Callable[[Collection[str]], Answer]
"""The best plan without some devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A plan of a part of the cluster."""

    report: SearchReport
    offered: Mapping[str, int]
    """Devices by type that the plan could have used."""
    used: Mapping[str, int]
    """Devices by type that it uses."""
    left_out: frozenset[str]
    """Devices that it could not use."""
    cost: Cost | None
    """None: a device that it uses has no price."""

    @property
    def num_devices(self) -> int:
        """Devices that the plan uses."""
        return sum(self.used.values())

    @property
    def step_time_s(self) -> float:
        """Its predicted step time [s]."""
        return self.report.step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """Every plan that was looked at."""

    points: tuple[Point, ...]
    """By the number of devices used, then by step time; one for each set of devices by type."""
    num_searches: int
    """Searches that it took, that of the whole cluster included."""

    def is_fastest(self, point: Point) -> bool:
        """Whether no other point is as fast with fewer devices, or faster with as many."""
        return not any(
            other.num_devices <= point.num_devices
            and other.step_time_s <= point.step_time_s
            and (other.num_devices, other.step_time_s) != (point.num_devices, point.step_time_s)
            for other in self.points
        )

    def is_cheapest(self, point: Point) -> bool:
        """Whether no other point is as fast for less an hour, or faster for as much; False without
        prices."""
        if point.cost is None:
            return False
        mine = (point.cost.per_hour, point.step_time_s)
        return not any(
            other.cost.per_hour <= mine[0]
            and other.step_time_s <= mine[1]
            and (other.cost.per_hour, other.step_time_s) != mine
            for other in self.points
            if other.cost is not None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Nodes that hold the same devices."""

    devices: tuple[str, ...]
    """Their devices, node after node."""
    node_size: int
    levels: tuple[int, ...]
    """How many devices to offer: rising, the last one is all of them."""


def groups_of(cluster: Cluster, excluded: Collection[str], *, max_searches: int) -> list[Group]:
    """The groups of the devices that are not excluded, in the order of the file."""
    nodes: dict[str, list[str]] = {}
    for device in cluster.devices.values():
        if device.id not in excluded:
            nodes.setdefault(device.node, []).append(device.id)
    alike: dict[object, list[list[str]]] = {}
    for ids in nodes.values():
        types = Counter(cluster.devices[d].type for d in ids)
        alike.setdefault(tuple(sorted(types.items())), []).append(ids)
    number = len(alike)
    # Up to `number` searches a round, fewer once groups are complete.
    parts = max(1, 2 * max_searches // (number * (number + 1)))
    return [
        Group(
            devices=tuple(d for ids in members for d in ids),
            node_size=len(members[0]),
            levels=_levels(len(members), len(members[0]), parts),
        )
        for members in alike.values()
    ]


def _levels(num_nodes: int, node_size: int, parts: int) -> tuple[int, ...]:
    """Device counts that cut a group in about ``parts``: whole nodes, or equal parts of nodes."""
    if num_nodes >= parts:
        return tuple(
            node_size * n
            for n in sorted({math.ceil(num_nodes * i / parts) for i in range(1, parts + 1)})
        )
    within = min(node_size, parts // num_nodes)
    ends = sorted({math.ceil(node_size * i / within) for i in range(1, within + 1)})
    return tuple(node * node_size + end for node in range(num_nodes) for end in ends)


class Explorer:
    """Offers more and more of a cluster to a search. Every answer is remembered."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        whole: SearchReport,
        search: Search,
        *,
        excluded: Collection[str] = (),
        max_searches: int = MAX_SEARCHES,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            whole: the plan of the whole cluster.
            excluded: devices that are never offered.
            max_searches: at most so many, that of ``whole`` included.
        """
        self.profile = profile
        self.cluster = cluster
        self.search = search
        self.excluded = frozenset(excluded)
        self.max_searches = max_searches
        self.progress = progress
        self.groups = groups_of(cluster, excluded, max_searches=max_searches)
        self.num_searches = 1
        everything = tuple(len(group.devices) for group in self.groups)
        self._points: dict[tuple[int, ...], Point | None] = {}
        self._points[everything] = self._point(everything, whole)
        self._speeds = {t: _speed(profile, t) for t in {d.type for d in cluster.devices.values()}}

    # --- What is offered --------------------------------------------------------------------------

    def left_out(self, counts: Sequence[int]) -> frozenset[str]:
        """Devices that are not offered; of each group the first ``counts`` are."""
        return self.excluded | {
            device
            for group, n in zip(self.groups, counts, strict=True)
            for device in group.devices[n:]
        }

    def offered(self, counts: Sequence[int]) -> list[str]:
        """Devices that are offered."""
        return [
            device
            for group, n in zip(self.groups, counts, strict=True)
            for device in group.devices[:n]
        ]

    def is_known(self, counts: Sequence[int]) -> bool:
        """Whether it costs no search to say what a part gives."""
        return tuple(counts) in self._points or not self._may_fit(counts)

    @property
    def num_left(self) -> int:
        """Searches that are left."""
        return self.max_searches - self.num_searches

    def try_counts(self, counts: Sequence[int]) -> Point | None:
        """The plan of the first so many devices of each group; None: there is none."""
        key = tuple(counts)
        if key not in self._points:
            self._points[key] = self._searched(key) if self._may_fit(key) else None
        return self._points[key]

    def _searched(self, counts: tuple[int, ...]) -> Point | None:
        if self.progress is not None:
            what = f"{len(self.offered(counts))} devices"
            self.progress(self.num_searches, self.max_searches, what)
        self.num_searches += 1
        answer = self.search(self.left_out(counts))
        return None if isinstance(answer, InfeasibleError) else self._point(counts, answer)

    def _point(self, counts: Sequence[int], report: SearchReport) -> Point:
        return Point(
            report=report,
            offered=self._by_type(self.offered(counts)),
            used=self._by_type(place.device for place in report.plan.ranks),
            left_out=self.left_out(counts),
            cost=cost_of(self.cluster, report.plan, report.step_time_s),
        )

    def _by_type(self, devices: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(self.cluster.devices[d].type for d in devices).items()))

    def _may_fit(self, counts: Sequence[int]) -> bool:
        """Whether all memory together holds the parameters once, as every plan must."""
        model, memory = self.profile.model, self.profile.memory
        room = sum(self.cluster.type_of(device).memory_bytes for device in self.offered(counts))
        # The least of all plans: one pipeline, where sharding the optimizer's state saves nothing.
        return room >= model.stage_parameters(0, model.num_blocks) * memory.bytes_per_parameter

    # --- The way from nothing to the whole --------------------------------------------------------

    def climb(self, *, by_cost: bool = False) -> None:
        """Go from nothing to the whole cluster, a part of a group a round."""
        counts = tuple(0 for _ in self.groups)
        now: Point | None = None
        rounds = sum(len(group.levels) for group in self.groups)
        for done in range(rounds - 1):
            steps = self._steps(counts)
            affordable = math.ceil(self.num_left / (rounds - 1 - done))
            tried = self._worth_trying(counts, steps, affordable)
            found = [(step, point) for step in tried if (point := self.try_counts(step))]
            if found:
                counts, now = min(found, key=lambda f: self._rank(counts, now, f[0], f[1], by_cost))
            else:  # Nothing fits yet: the more memory, the sooner it does.
                counts = max(tried or steps, key=lambda step: self._room(counts, step))

    def _steps(self, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The part that comes next, of each group that is not complete."""
        return [
            (*counts[:g], next(level for level in group.levels if level > n), *counts[g + 1 :])
            for g, (group, n) in enumerate(zip(self.groups, counts, strict=True))
            if n < group.levels[-1]
        ]

    def _worth_trying(
        self, counts: tuple[int, ...], steps: list[tuple[int, ...]], affordable: int
    ) -> list[tuple[int, ...]]:
        """Those that cost no search, and as many more as can be afforded, fastest devices first."""
        known = [step for step in steps if self.is_known(step)]
        others = sorted(
            (step for step in steps if step not in known),
            key=lambda step: -self._speed_of(counts, step),
        )
        return known + others[: max(0, min(affordable, self.num_left))]

    def _rank(
        self,
        counts: tuple[int, ...],
        now: Point | None,
        step: tuple[int, ...],
        point: Point,
        by_cost: bool,
    ) -> float:
        """The smaller, the more a step helps: by cost of a step, else by time for each device."""
        if by_cost and point.cost is not None:
            return point.cost.per_step
        if now is None:
            return point.step_time_s * sum(step)
        return (point.step_time_s - now.step_time_s) / (sum(step) - sum(counts))

    def _added(self, counts: tuple[int, ...], step: tuple[int, ...]) -> set[str]:
        return set(self.offered(step)).difference(self.offered(counts))

    def _speed_of(self, counts: tuple[int, ...], step: tuple[int, ...]) -> float:
        added = self._added(counts, step)
        return sum(self._speeds[self.cluster.devices[d].type] for d in added) / len(added)

    def _room(self, counts: tuple[int, ...], step: tuple[int, ...]) -> int:
        return sum(self.cluster.type_of(d).memory_bytes for d in self._added(counts, step))

    # --- Near a good part -------------------------------------------------------------------------

    def refine(self, value: Callable[[Point], float]) -> None:
        """From the point of the least value: one device less or more of a group, as long as that
        helps and searches are left."""
        while True:
            counts, best = min(
                ((c, p) for c, p in self._points.items() if p is not None),
                key=lambda item: value(item[1]),
            )
            for step in self._neighbours(counts):
                if self.num_left <= 0 and not self.is_known(step):
                    return
                point = self.try_counts(step)
                if point is not None and value(point) < value(best):
                    break
            else:
                return

    def _neighbours(self, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """One device less, one more; where the group has many nodes, one node."""
        result = []
        for g, group in enumerate(self.groups):
            unit = 1 if len(group.devices) <= _FEW * group.node_size else group.node_size
            for n in (counts[g] - unit, counts[g] + unit):
                if 0 <= n <= len(group.devices):
                    result.append((*counts[:g], n, *counts[g + 1 :]))
        return [step for step in result if any(step)]

    def frontier(self) -> Frontier:
        """What was found so far."""
        unique: dict[object, Point] = {}
        for point in self._points.values():
            if point is not None:
                key = tuple(point.used.items())
                if key not in unique or point.step_time_s < unique[key].step_time_s:
                    unique[key] = point
        points = sorted(unique.values(), key=lambda p: (p.num_devices, p.step_time_s))
        return Frontier(points=tuple(points), num_searches=self.num_searches)


_FEW = 4
"""Nodes of a group up to which single devices are given up, and not whole nodes."""


def _speed(profile: Profile, device_type: str) -> float:
    """Samples a second of one device that holds the whole model, memory aside; 0: not profiled."""
    best = 0.0
    for size in profile.micro_batch_sizes:
        entries = [
            profile.lookup(device_type, kind, tensor_parallel=1, micro_batch_size=size)
            for kind in profile.model.kinds
        ]
        times = [e.forward_s + e.backward_s for e in entries if e is not None]
        if len(times) == len(entries):
            best = max(best, size / sum(times))
    return best


def explore(
    profile: Profile,
    cluster: Cluster,
    whole: SearchReport,
    search: Search,
    *,
    excluded: Collection[str] = (),
    max_searches: int = MAX_SEARCHES,
    progress: Progress | None = None,
) -> Frontier:
    """Step time against the number of devices.

    Args:
        whole: the plan of the whole cluster.
        search: the best plan without some devices; asked less than ``max_searches`` times.
        excluded: devices that are never offered.
    """
    explorer = Explorer(
        profile,
        cluster,
        whole,
        search,
        excluded=excluded,
        max_searches=max_searches,
        progress=progress,
    )
    explorer.climb()
    return explorer.frontier()
