"""What `eth plan` is asked beyond its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """What is asked of a plan beyond its inputs; by default nothing."""

    max_pipelines: int | None = None
    tensor_parallel: tuple[int, ...] | None = None
    recompute: bool = True
    exclude: tuple[str, ...] = ()
    """Devices, nodes and types to leave out."""
    objective: str = "step-time"
    """step-time or cost."""
    max_step_time_s: float | None = None
    max_gap: float | None = None
    time_limit_s: float | None = None
    no_prune: tuple[str, ...] = ()
    """Rules of the search that are switched off."""
    explain: bool = False
    what_if: tuple[tuple[tuple[int, str], ...], ...] = ()
    """Changes to the cluster: of each question, numbers and names."""
    old_plan: Path | None = None
    """The plan to start from."""
    lost: tuple[str, ...] = ()
    """Devices and nodes that are gone."""
    pins: tuple[str, ...] = ()
    """Parts of the plan that it has to have, in words."""
    frontier: bool = False
    frontier_svg: Path | None = None

    @property
    def by_cost(self) -> bool:
        """Whether the cheapest plan is asked for, not the fastest."""
        return self.objective == "cost"

    @property
    def shows_frontier(self) -> bool:
        """Whether the frontier is asked for in any form."""
        return self.frontier or self.frontier_svg is not None

    @property
    def replans(self) -> bool:
        """Whether the plan is made from an old one, or around pinned parts."""
        return self.old_plan is not None or bool(self.pins)

    @property
    def asks(self) -> bool:
        """Whether more is asked than a search for the fastest plan."""
        return self.by_cost or self.explain or bool(self.what_if) or self.shows_frontier
