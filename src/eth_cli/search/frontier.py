"""Step time and cost against how many devices are used: plans of parts of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eth_cli.search.answer import SearchReport
from eth_cli.search.economics import Cost


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
