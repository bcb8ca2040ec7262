"""The same question asked again: of fewer devices, or of a changed cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, SearchReport, search
from eth_cli.search.simulate import simulate

Answer = SearchReport | InfeasibleError
"""A plan, or why there is none."""

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


class SearchAgain:
    """Searches with the options of a search that has succeeded. Counts its searches."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        options: SearchOptions,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.options = options
        self.clock = clock
        self.num_searches = 0

    def without(self, excluded: Collection[str]) -> Answer:
        """The plan without some devices, those that the options leave out among them."""
        return self._search(self.profile, self.cluster, self.options.excluded | set(excluded))

    def on(
        self,
        cluster: Cluster,
        *,
        profile: Profile | None = None,
        excluded: Collection[str] | None = None,
    ) -> Answer:
        """The plan on another cluster, by another profile where one is given.

        Args:
            excluded: the devices that it may not use, instead of those of the options.
        """
        kept = self.options.excluded if excluded is None else frozenset(excluded)
        return self._search(profile or self.profile, cluster, kept)

    def best_on(
        self, known: SearchReport, cluster: Cluster, *, profile: Profile | None = None
    ) -> float | None:
        """Step time on a cluster where a known plan is legal too: the better of it and of a new
        search; None: neither fits [s].

        A search that is not exhaustive may miss what it found on a smaller cluster.
        """
        answer = self.on(cluster, profile=profile)
        times = [] if isinstance(answer, InfeasibleError) else [answer.step_time_s]
        kept = simulate(known.plan, profile or self.profile, cluster)
        if not kept.excesses:
            times.append(kept.step_time_s)
        return min(times, default=None)

    def _search(self, profile: Profile, cluster: Cluster, excluded: frozenset[str]) -> Answer:
        self.num_searches += 1
        options = replace(self.options, excluded=excluded)
        try:
            return search(profile, cluster, options, clock=self.clock)
        except InfeasibleError as error:
            return error
        except ConfigError as error:
            # The question was sound for the whole cluster: these devices alone cannot answer it.
            why = error.faults[0].message
            return InfeasibleError(why, binding=why, suggestion="")
