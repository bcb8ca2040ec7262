"""What `eth plan` is asked beyond the plan: cost, frontier, what-if and explanation.

Loaded only where one of them is asked for, so that a plain plan does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.commands.controls import Controls
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.render.console import output_width
from eth_cli.render.progress import progress
from eth_cli.search.again import Answer, SearchAgain
from eth_cli.search.cheapest import Cheapest, find_cheapest
from eth_cli.search.economics import Cost, check_prices, cost_of
from eth_cli.search.edits import Change, Variant, apply_changes
from eth_cli.search.explain import Explanation, explain
from eth_cli.search.explore import Explorer
from eth_cli.search.frontier import Frontier
from eth_cli.search.planner import SearchOptions, SearchReport
from eth_cli.search.what_if import Outcome, check_profiled, outcomes, variants

LEFT_OUT = "left out to save cost: the plan without it costs least of those that were tried"
"""Why the cheapest plan does not use a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The plan to show, and the answers to what else was asked."""

    chosen: Answer
    cluster: Cluster
    cost: Cost | None
    cheapest: Cheapest | None
    frontier: Frontier | None
    what_if: tuple[Outcome, ...]
    explanation: Explanation | None

    def views(self) -> Iterator[RenderableType]:
        """Everything for people."""
        if self.cost is not None:
            from eth_cli.render.money import cost_line

            yield cost_line(self.cost)
        if self.cheapest is not None or self.frontier is not None:
            from eth_cli.render.frontier import cheapest_line, frontier_view

            if self.cheapest is not None:
                yield cheapest_line(self.cheapest)
            if self.frontier is not None:
                yield from frontier_view(self.frontier, width=output_width())
        if self.what_if:
            from eth_cli.render.what_if import what_if_view

            yield from what_if_view(self.what_if)
        if self.explanation is not None:
            from eth_cli.render.explain import explanation_view

            yield from explanation_view(self.explanation)

    def data(self) -> dict[str, Any]:
        """Everything as plain JSON data, each under the name of its option."""
        data: dict[str, Any] = {}
        if self.cost is not None:
            from eth_cli.render.money import cost_data

            data["cost"] = cost_data(self.cost)
        if self.frontier is not None:
            from eth_cli.render.frontier import frontier_data

            data["frontier"] = frontier_data(self.frontier)
        if self.what_if:
            from eth_cli.render.what_if import what_if_data

            data["what_if"] = what_if_data(self.what_if)
        if self.explanation is not None:
            from eth_cli.render.explain import explanation_data

            data["explain"] = explanation_data(self.explanation)
        return data

    def write_svg(self, path: Path) -> None:
        """Draw the frontier, where there is one."""
        if self.frontier is not None and isinstance(self.chosen, SearchReport):
            from eth_cli.render.frontier import frontier_svg

            title = f"{self.chosen.plan.model} on {self.cluster.name}"
            serde.write_text(path, frontier_svg(self.frontier, title=title))


class Questions:
    """What is asked of one cluster. Made before any search, so that a wrong question costs none."""

    def __init__(
        self, controls: Controls, cluster: Cluster, cluster_path: Path, excluded: dict[str, str]
    ) -> None:
        """
        Raises:
            ConfigError: a price is missing, or a change is not possible.
        """
        self.controls = controls
        self.cluster = cluster
        self.excluded = excluded
        if controls.by_cost:
            check_prices(cluster, file=str(cluster_path), excluded=excluded)
        self.changes = tuple(
            tuple(Change(number, name) for number, name in asked) for asked in controls.what_if
        )
        self.variants: tuple[Variant, ...] = variants(cluster, self.changes, excluded)

    def largest_cluster(self) -> Cluster:
        """The cluster with all that any question adds: what an estimated profile must cover."""
        added = [change for asked in self.changes for change in asked if change.number > 0]
        return apply_changes(self.cluster, added).cluster

    def check_profiled(self, profile: Profile) -> None:
        """Raise ConfigError where the profile lacks a type that a question adds."""
        check_profiled(profile, self.variants)

    def answer(self, answer: Answer, profile: Profile, options: SearchOptions) -> Answered:
        """Answer everything. Where there is no plan, what-if alone can say more."""
        replanner = SearchAgain(profile, self.cluster, options, clock=time.monotonic)
        chosen, cheapest, frontier = answer, None, None
        if self.controls.by_cost and isinstance(answer, SearchReport):
            with progress("cheapest plan") as report:
                try:
                    cheapest = find_cheapest(
                        profile,
                        self.cluster,
                        answer,
                        replanner.without,
                        max_step_time_s=self.controls.max_step_time_s,
                        excluded=self.excluded,
                        progress=report,
                    )
                    chosen = self._cheapest_report(cheapest)
                except InfeasibleError as error:
                    chosen = error
        if self.controls.shows_frontier and isinstance(chosen, SearchReport):
            if cheapest is not None:
                frontier = cheapest.frontier
            elif isinstance(answer, SearchReport):
                with progress("frontier") as report:
                    explorer = Explorer(
                        profile=profile,
                        cluster=self.cluster,
                        whole=answer,
                        search=replanner.without,
                        excluded=self.excluded,
                        progress=report,
                    )
                    explorer.climb()
                    frontier = explorer.frontier()
        return Answered(
            chosen=chosen,
            cluster=self.cluster,
            cost=self._cost(chosen),
            cheapest=cheapest,
            frontier=frontier,
            what_if=self._what_if(chosen, replanner),
            explanation=self._explanation(chosen, profile, replanner),
        )

    def _what_if(self, now: Answer, replanner: SearchAgain) -> tuple[Outcome, ...]:
        if not self.changes:
            return ()
        with progress("what if") as report:
            return outcomes(
                None if isinstance(now, InfeasibleError) else now,
                replanner,
                self.changes,
                self.variants,
                progress=report,
            )

    def _explanation(
        self, chosen: Answer, profile: Profile, replanner: SearchAgain
    ) -> Explanation | None:
        if not self.controls.explain or isinstance(chosen, InfeasibleError):
            return None
        with progress("explanation") as report:
            return explain(chosen, profile, self.cluster, replanner, progress=report)

    def _cost(self, chosen: Answer) -> Cost | None:
        if isinstance(chosen, InfeasibleError):
            return None
        return cost_of(self.cluster, chosen.plan, chosen.step_time_s)

    def _cheapest_report(self, found: Cheapest) -> SearchReport:
        """The cheapest plan, which says what it was made for."""
        point = found.point
        reasons = dict.fromkeys(point.left_out, LEFT_OUT) | self.excluded
        asked: dict[str, Any] = {"objective": self.controls.objective}
        if self.controls.max_step_time_s is not None:
            asked["max_step_time_s"] = self.controls.max_step_time_s
        return point.report.saying(reasons, asked)
