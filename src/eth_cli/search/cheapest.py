"""The plan whose tokens cost least, within a limit on the step time."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.again import Progress
from eth_cli.search.answer import SearchReport
from eth_cli.search.explore import MAX_SEARCHES, Explorer, Search
from eth_cli.search.frontier import Frontier, Point
from eth_cli.units import format_seconds

_CLIMB_SEARCHES = 10
"""Searches for the way from nothing to the whole cluster; the rest look near the best part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """The point whose step costs least, among all that were looked at."""

    point: Point
    fastest: Point
    """The fastest plan, for comparison."""
    frontier: Frontier


def find_cheapest(
    profile: Profile,
    cluster: Cluster,
    whole: SearchReport,
    search: Search,
    *,
    max_step_time_s: float | None = None,
    excluded: Collection[str] = (),
    progress: Progress | None = None,
) -> Cheapest:
    """The least cost of a step over plans of parts of the cluster. Every type has a price.

    Args:
        whole: the plan of the whole cluster.
        search: the best plan without some devices.
        max_step_time_s: no step may take longer [s].
        excluded: devices that are never offered.

    Raises:
        InfeasibleError: no plan that was found keeps the step time.
    """
    explorer = Explorer(
        profile=profile,
        cluster=cluster,
        whole=whole,
        search=search,
        excluded=excluded,
        max_searches=_CLIMB_SEARCHES,
        progress=progress,
    )
    explorer.climb(by_cost=True)
    explorer.max_searches = MAX_SEARCHES

    def value(point: Point) -> float:
        assert point.cost is not None  # every type has a price
        is_slow = max_step_time_s is not None and point.step_time_s > max_step_time_s
        return math.inf if is_slow else point.cost.per_step

    explorer.refine(value)
    frontier = explorer.frontier()
    fastest = min(frontier.points, key=lambda point: point.step_time_s)
    best = min(frontier.points, key=value)
    if max_step_time_s is not None and math.isinf(value(best)):
        raise _too_slow(fastest, whole, max_step_time_s)
    return Cheapest(point=best, fastest=fastest, frontier=frontier)


def _too_slow(fastest: Point, whole: SearchReport, max_step_time_s: float) -> InfeasibleError:
    limit, least = format_seconds(max_step_time_s), format_seconds(fastest.step_time_s)
    binding = f"a step must take at most {limit}, and the fastest plan found takes {least}"
    if whole.bound_s > max_step_time_s:
        verdict = "no plan exists"
        binding += f" (none takes less than {format_seconds(whole.bound_s)})"
    else:
        verdict = "no plan was found"
    suggestion = f"--max-step-time {math.ceil(fastest.step_time_s * 1e3) / 1e3:.3f}s"
    return InfeasibleError(
        f"{verdict}: {binding}; what would fit: {suggestion}",
        binding=binding,
        suggestion=suggestion,
    )
