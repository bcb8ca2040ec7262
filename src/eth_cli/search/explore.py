"""Looks for good parts of a cluster, by a search for each that is looked at.

Nodes that hold the same devices form a group. From nothing, each round adds the next part of the
one group whose addition helps most, which a search for each of them tells, until the whole cluster
is reached. Every plan that was found on the way is a point. The number of searches is bounded:
where there are many groups, the parts are large and only the groups whose devices compute fastest
are tried in a round. So the frontier shows what is attainable, not that nothing else is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.again import Answer, Progress
from eth_cli.search.answer import SearchReport
from eth_cli.search.economics import cost_of
from eth_cli.search.frontier import Frontier, Point
from eth_cli.search.parts import Part, Parts

MAX_SEARCHES = 16
"""Searches that a frontier takes at most, that of the whole cluster included."""

Search = Callable[[Collection[str]], Answer]
"""The best plan without some devices."""


@dataclass(kw_only=True)
class Explorer:
    """Offers more and more of a cluster to a search. Every answer is remembered."""

    profile: Profile
    cluster: Cluster
    whole: SearchReport
    """The plan of the whole cluster."""
    search: Search
    """Asked less than ``max_searches`` times."""
    excluded: Collection[str] = ()
    """Devices that are never offered."""
    max_searches: int = MAX_SEARCHES
    """At most so many, that of ``whole`` included."""
    progress: Progress | None = None
    num_searches: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.parts = Parts(self.cluster, self.excluded, max_searches=self.max_searches)
        everything = self.parts.everything
        self._points: dict[Part, Point | None] = {everything: self._point(everything, self.whole)}
        types = {device.type for device in self.cluster.devices.values()}
        self._speeds = {name: _speed(self.profile, name) for name in types}

    @property
    def num_left(self) -> int:
        """Searches that are left."""
        return self.max_searches - self.num_searches

    def is_known(self, part: Part) -> bool:
        """Whether it costs no search to say what a part gives."""
        return part in self._points or not self._may_fit(part)

    def try_part(self, part: Part) -> Point | None:
        """The plan of a part; None: there is none."""
        if part not in self._points:
            self._points[part] = self._searched(part) if self._may_fit(part) else None
        return self._points[part]

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

    def _searched(self, part: Part) -> Point | None:
        if self.progress is not None:
            self.progress(self.num_searches, self.max_searches, f"{sum(part)} devices")
        self.num_searches += 1
        answer = self.search(self.parts.left_out(part))
        return None if isinstance(answer, InfeasibleError) else self._point(part, answer)

    def _point(self, part: Part, report: SearchReport) -> Point:
        return Point(
            report=report,
            offered=self._by_type(self.parts.offered(part)),
            used=self._by_type(place.device for place in report.plan.ranks),
            left_out=self.parts.left_out(part),
            cost=cost_of(self.cluster, report.plan, report.step_time_s),
        )

    def _by_type(self, devices: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(self.cluster.devices[d].type for d in devices).items()))

    def _memory_bytes(self, devices: Iterable[str]) -> int:
        return sum(self.cluster.type_of(device).memory_bytes for device in devices)

    def _may_fit(self, part: Part) -> bool:
        """Whether all memory together holds the parameters once, as every plan must."""
        model, memory = self.profile.model, self.profile.memory
        room = self._memory_bytes(self.parts.offered(part))
        # The least of all plans: one pipeline, where sharding the optimizer's state saves nothing.
        return room >= model.stage_parameters(0, model.num_blocks) * memory.bytes_per_parameter

    # --- The way from nothing to the whole --------------------------------------------------------

    def climb(self, *, by_cost: bool = False) -> None:
        """Go from nothing to the whole cluster, a level of a group a round."""
        part = self.parts.nothing
        now: Point | None = None
        rounds = sum(len(group.levels) for group in self.parts.groups)
        for done in range(rounds - 1):
            steps = self.parts.steps(part)
            affordable = math.ceil(self.num_left / (rounds - 1 - done))
            tried = self._worth_trying(part, steps, affordable)
            found = [(step, point) for step in tried if (point := self.try_part(step))]
            if found:
                part, now = min(found, key=lambda f: _rank(part, now, f[0], f[1], by_cost))
            else:  # Nothing fits yet: the more memory, the sooner it does.
                part = max(
                    tried or steps,
                    key=lambda step: self._memory_bytes(self.parts.added(part, step)),
                )

    def _worth_trying(self, part: Part, steps: list[Part], affordable: int) -> list[Part]:
        """Those that cost no search, and as many more as can be afforded, fastest devices first."""
        known = [step for step in steps if self.is_known(step)]
        others = sorted(
            (step for step in steps if step not in known),
            key=lambda step: -self._speed_of(self.parts.added(part, step)),
        )
        return known + others[: max(0, min(affordable, self.num_left))]

    def _speed_of(self, devices: Collection[str]) -> float:
        return sum(self._speeds[self.cluster.devices[d].type] for d in devices) / len(devices)

    # --- Near a good part -------------------------------------------------------------------------

    def refine(self, value: Callable[[Point], float]) -> None:
        """From the point of the least value: one device less or more of a group, as long as that
        helps and searches are left."""
        while True:
            part, best = min(
                ((c, p) for c, p in self._points.items() if p is not None),
                key=lambda item: value(item[1]),
            )
            for step in self.parts.neighbours(part):
                if self.num_left <= 0 and not self.is_known(step):
                    return
                point = self.try_part(step)
                if point is not None and value(point) < value(best):
                    break
            else:
                return


def _rank(part: Part, now: Point | None, step: Part, point: Point, by_cost: bool) -> float:
    """The smaller, the more a step helps: by cost of a step, else by time for each device."""
    if by_cost and point.cost is not None:
        return point.cost.per_step
    if now is None:
        return point.step_time_s * sum(step)
    return (point.step_time_s - now.step_time_s) / (sum(step) - sum(part))


def _speed(profile: Profile, device_type: str) -> float:
    """Samples a second of one device of a type, memory aside; 0: not profiled.

    At the micro-batch size and width, over the width, at which it is best.
    """
    best = 0.0
    for width in profile.widths(device_type):
        for size in profile.micro_batch_sizes:
            entries = [
                profile.lookup(device_type, kind, tensor_parallel=width, micro_batch_size=size)
                for kind in profile.model.kinds
            ]
            times = [e.forward_s + e.backward_s for e in entries if e is not None]
            if len(times) == len(entries):
                best = max(best, size / sum(times) / width)
    return best
