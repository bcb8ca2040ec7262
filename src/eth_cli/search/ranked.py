"""Plans that take about the least time, to choose among by what else they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from eth_cli.search.exhaust import Best
from eth_cli.search.refine import Pipelines

SAME = 1.005
"""Ratio of step times up to which plans count as equally fast: the fewest bytes to move decide."""


@dataclass(kw_only=True)
class Ranked(Best):
    """The best plan so far, and all others that take about as long."""

    near: dict[Pipelines, float] = field(default_factory=dict)
    """Step time by plan, of those that took at most `SAME` of the best when they were offered."""

    def offer(self, pipelines: Pipelines, time_s: float) -> bool:
        """Keep a plan if it is better, or about as good."""
        is_better = super().offer(pipelines, time_s)
        is_allowed = self.max_pipelines is None or len(pipelines) <= self.max_pipelines
        if is_allowed and time_s <= self.time_s * SAME:
            self.near[pipelines] = time_s
        return is_better

    def fastest(self, number: int) -> list[Pipelines]:
        """The fastest plans, at most so many."""
        near = [(t, i, p) for i, (p, t) in enumerate(self.near.items()) if t <= self.time_s * SAME]
        return [pipelines for _, _, pipelines in sorted(near)[:number]]
