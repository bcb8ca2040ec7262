"""From a profile and a cluster to a plan: `search`, and `compare` for all strategies.

The only module that knows the order of things: usable kinds -> baselines -> where they are few:
all families, their bound, quick plans and the exhaustive search -> where that proves nothing:
column generation -> a checked `Plan`. Pure:
no clock (the caller may pass one in), no files, no printing; the same inputs give the same bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, replace

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, EthError, InfeasibleError, SearchStoppedError
from eth_cli.profile.table import Profile
from eth_cli.search import heuristic
from eth_cli.search.answer import Rival, SearchReport, make_report
from eth_cli.search.baselines import best_grid
from eth_cli.search.certificate import certified_bound_s
from eth_cli.search.cost import CostModel
from eth_cli.search.diagnose import closest_fits, infeasible
from eth_cli.search.exhaust import Best, Exhaustive
from eth_cli.search.fit import placed_alone
from eth_cli.search.mixes import Mixes
from eth_cli.search.pacing import self_contained
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.pricing import Pricing
from eth_cli.search.refine import refine
from eth_cli.search.request import (
    EVEN,
    HPP,
    STRATEGIES,
    UNEVEN_LAYERS,
    SearchOptions,
    check_dtype,
    micro_batch_sizes,
    problem_of,
    unusable_types,
)
from eth_cli.search.spaces import all_families
from eth_cli.search.templates import Kind, SearchOverError, Template
from eth_cli.search.unused import explain_unused, unused_types
from eth_cli.units import format_seconds

__all__ = [
    "STRATEGIES",
    "Rival",
    "SearchOptions",
    "SearchReport",
    "compare",
    "search",
    "self_contained",
]


def search(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    *,
    clock: Callable[[], float] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> SearchReport:
    """The best plan of a strategy.

    Args:
        clock: seconds since any moment, for `SearchReport.wall_s` and ``options.time_limit_s``; it
            decides nothing else.
        is_stopped: asked now and then; once it says yes, the search ends with the best plan so far.

    Raises:
        ConfigError: the options do not fit the profile, or it covers no device of the cluster.
        InfeasibleError: no plan fits the devices' memory; says what lacks and what would help. Or
            none was found in the time given.
        SearchStoppedError: it was stopped before it had found a plan.
    """
    return Search(profile, cluster, options, clock, is_stopped).run()


def compare(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    *,
    clock: Callable[[], float] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> dict[str, SearchReport | InfeasibleError]:
    """Every strategy's answer, or why it has none; once stopped, those that there are.

    Raises:
        ConfigError: as `search`; it would be the same for all.
        SearchStoppedError: it was stopped before the first strategy had a plan.
    """
    answers: dict[str, SearchReport | InfeasibleError] = {}
    for strategy in STRATEGIES:
        chosen = SearchOptions(**(asdict(options) | {"strategy": strategy}))
        try:
            answers[strategy] = search(profile, cluster, chosen, clock=clock, is_stopped=is_stopped)
        except InfeasibleError as error:
            answers[strategy] = error
        except SearchStoppedError:
            if not answers:
                raise
    return answers


class Search:
    """One search: what is asked, the problem, and the answer."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        options: SearchOptions,
        clock: Callable[[], float] | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.options = options
        self.clock = clock or (lambda: 0.0)
        self.is_stopped = is_stopped or (lambda: False)
        self.started_s = self.clock()
        self.model = CostModel(profile, cluster)
        self.sizes = micro_batch_sizes(profile, cluster, options)
        self.unusable = unusable_types(self.model, self.sizes, options)
        check_dtype(profile, cluster)
        kinds = _kinds(cluster, self.unusable, options.excluded)
        self.problem = problem_of(self.model, options, kinds, self.sizes, is_over=self.is_over)

    def run(self) -> SearchReport:
        if not self.problem.kinds:
            raise self.infeasible(is_proved=True)
        if self.options.strategy == HPP:
            return self._hpp()
        if self.options.strategy in (EVEN, UNEVEN_LAYERS):
            return self._baseline()
        raise ConfigError.single(
            "--strategy",
            "",
            f"{self.options.strategy!r} is not known; use one of {', '.join(STRATEGIES)}",
        )

    # --- Strategies --------------------------------------------------------------------------

    def _baseline(self) -> SearchReport:
        try:
            grid = best_grid(
                self.problem,
                self.options.strategy,
                max_pipelines=self.options.max_pipelines,
                level_shares=self.options.level_shares,
            )
        except SearchOverError:
            raise self._nothing_found() from None
        best = Best(pipelines=grid.pipelines, time_s=grid.step_time_s)
        best.num_simulated = grid.num_tried
        # Every grid of the strategy was looked at; the bound is that of all plans all the same.
        bound_s = min(all_families(self.problem).bound_s, grid.step_time_s)
        unused = dict.fromkeys(unused_types(self.problem, grid.pipelines), grid.why_left_out)
        return self.report(best, bound_s, unused, ())

    def _hpp(self) -> SearchReport:
        best = Best(max_pipelines=self.options.max_pipelines)
        rivals = []
        starts = []
        for strategy in (UNEVEN_LAYERS, EVEN):
            try:
                grid = best_grid(self.problem, strategy, max_pipelines=self.options.max_pipelines)
            except InfeasibleError as error:
                rivals.append(Rival(name=strategy, step_time_s=None, note=error.binding))
                continue
            except SearchOverError:
                rivals.append(Rival(name=strategy, step_time_s=None, note=_NOT_LOOKED_AT))
                continue
            # Baselines have single devices, whatever widths are asked for.
            if self.options.tensor_parallel is None or 1 in self.options.tensor_parallel:
                best.offer(grid.pipelines, grid.step_time_s)
                starts.append(grid.pipelines)
            rivals.append(
                Rival(name=strategy, step_time_s=grid.step_time_s, note=grid.why_left_out)
            )
        known = all_families(self.problem)
        bound_s = known.bound_s
        if starts and sum(self.problem.counts) <= _LEVELLED_DEVICES:
            starts += self._offer_levelled(best)
        proved = False
        if known.families is not None:
            heuristic.improve(self.problem, known.families, best, bound_s=bound_s)
            self._refine(best, starts)
            starts = []  # They have been climbed from.
            is_open = best.limit_s > bound_s or not self.problem.pruning.bound
            if is_open and self._may_exhaust() and not self.is_over():
                proved = Exhaustive(
                    self.problem, known.families, best, budget=self.options.budget
                ).run()
        if not proved and not self.is_enough(best, bound_s):
            with contextlib.suppress(SearchOverError):
                bound_s = max(bound_s, self._price_out(best, bound_s, starts))
        if best.pipelines is None and not self.is_stopped():
            self._offer_any(best)
        if best.pipelines is None:
            if self.is_over():
                raise self._nothing_found()
            raise self.infeasible(is_proved=proved or math.isinf(known.bound_s))
        reasons = explain_unused(self.problem, best, is_final=proved)
        if proved or best.limit_s <= bound_s:
            bound_s = best.time_s
        return self.report(best, bound_s, reasons, tuple(rivals))

    def _price_out(
        self, best: Best, bound_s: float, starts: list[tuple[PlacedPipeline, ...]]
    ) -> float:
        """Offer what mixes of priced templates come to, and prove a bound [s].

        Raises:
            SearchOverError: the time of the search was over.
        """
        pricing = Pricing(self.problem)
        climbed = math.inf if starts else best.time_s
        templates = self._mix(pricing, best, bound_s)
        if sum(self.problem.counts) <= _NARROW_DEVICES:
            self._try_families(best, bound_s)
        if best.time_s < climbed:
            self._refine(best, starts)
        if self.is_enough(best, bound_s):
            return bound_s
        certified_s = certified_bound_s(
            pricing,
            templates,
            best_s=best.time_s,
            known_s=bound_s,
            max_pipelines=self.options.max_pipelines,
            is_over=self.is_over,
            prune=best.prune,
        )
        return min(certified_s, best.time_s)

    def _offer_levelled(self, best: Best) -> list[tuple[PlacedPipeline, ...]]:
        """Offer the best grid with shares of any size, which the batch need not divide; that."""
        most = self.options.max_pipelines
        try:
            grid = best_grid(self.problem, UNEVEN_LAYERS, max_pipelines=most, level_shares=True)
        except (InfeasibleError, SearchOverError):
            return []
        return [grid.pipelines] if best.offer(grid.pipelines, grid.step_time_s) else []

    def _spaces(self) -> list[list[int]]:
        """Options of stages by index: of single devices, without recomputation, and all, last."""
        options = list(enumerate(self.problem.options))
        single = [o for o, option in options if option.tensor_parallel == 1]
        plain = [o for o, option in options if not option.recompute]
        both = [o for o in single if o in plain]
        spaces = (both, single, plain, [o for o, _ in options])
        return [space for i, space in enumerate(spaces) if space and space not in spaces[:i]]

    def _try_families(self, best: Best, bound_s: float) -> None:
        """Offer plans from all families of the smaller spaces, where these are few enough."""
        asked = self.options
        for space in self._spaces()[:-1]:
            if best.time_s < bound_s * _FAR_FROM_BOUND or self.is_over():
                return
            options = [self.problem.options[o] for o in space]
            narrowed = replace(
                asked,
                tensor_parallel=tuple(sorted({o.tensor_parallel for o in options})),
                recompute=any(o.recompute for o in options),
            )
            kinds = self.problem.kinds
            problem = problem_of(self.model, narrowed, kinds, self.sizes, is_over=self.is_over)
            families = all_families(problem, max_operations=_NARROW_OPERATIONS).families
            if families is not None:
                heuristic.improve(problem, families, best, bound_s=bound_s)

    def _mix(self, pricing: Pricing, best: Best, bound_s: float) -> list[Template]:
        """Offer mixes of pipelines; the templates that the search for them knows."""
        if math.isinf(bound_s):
            return []
        # The answer lies between the bound and the best plan known.
        about_s = bound_s * min(_SLOW, math.sqrt(best.time_s / bound_s))
        mixes = Mixes(
            self.problem,
            pricing,
            best,
            about_s=about_s,
            max_pipelines=self.options.max_pipelines,
            is_over=self.is_over,
        )
        mixes.run(self._spaces())
        return list(dict.fromkeys(p.bundle.template for p in mixes.pool))

    def _nothing_found(self) -> EthError:
        """The error for a search that ended before it had a plan."""
        if self.is_stopped():
            return SearchStoppedError("interrupted before any plan was found")
        binding = f"none was found in the {format_seconds(self.options.time_limit_s or 0.0)} given"
        return InfeasibleError(
            f"no plan: {binding}", binding=binding, suggestion="a longer --time-limit"
        )

    def is_over(self) -> bool:
        """Whether the caller has stopped the search, or the time that it allows has passed."""
        if self.is_stopped():
            return True
        limit_s = self.options.time_limit_s
        return limit_s is not None and self.clock() - self.started_s >= limit_s

    def is_enough(self, best: Best, bound_s: float) -> bool:
        """Whether the best plan is as near to the optimum as the caller asks for, or proved."""
        most = 1 + (self.options.max_gap or 0.0)
        return best.limit_s <= bound_s * most or self.is_over()

    def _refine(self, best: Best, starts: list[tuple[PlacedPipeline, ...]]) -> None:
        """Climb from the best plan, and from those that look worse but have fewer segments."""
        first = [] if best.pipelines is None else [best.pipelines]
        budget = _REFINEMENT
        for pipelines in dict.fromkeys([*first, *starts]):
            budget = refine(self.model, pipelines, best, budget=budget, is_over=self.is_over)

    def _offer_any(self, best: Best) -> None:
        """A single pipeline that fits, where there is one: the last resort for a first plan."""
        for fit, fitter in closest_fits(self.problem):
            size = fitter.micro_batch_size
            if fit.lacking_bytes > 0 or self.options.global_batch_size % size:
                continue
            placed = (placed_alone(self.problem, fit, size),)
            best.offer(placed, self.model.evaluate(placed).step_time_s)
            heuristic.offer_templates(self.problem, [Template(size, fit.stages)], best)

    def _may_exhaust(self) -> bool:
        return sum(self.problem.counts) <= _EXHAUSTIVE_DEVICES

    # --- The answer ----------------------------------------------------------------------------

    def infeasible(self, *, is_proved: bool) -> InfeasibleError:
        """The error for a search without a plan."""
        # Where no stage fits any device: say what the least one lacks.
        too_old = {
            name
            for name, device_type in self.cluster.device_types.items()
            if device_type.lacks_dtype(self.profile.dtype) is not None
        }
        kinds = self.problem.kinds or _kinds(self.cluster, too_old, self.options.excluded)
        return infeasible(
            self.model,
            self.options,
            kinds=kinds,
            micro_batch_sizes=self.sizes,
            unusable=self.unusable,
            is_proved=is_proved,
        )

    def report(
        self,
        best: Best,
        bound_s: float,
        unused_reasons: dict[str, str],
        rivals: tuple[Rival, ...],
    ) -> SearchReport:
        """The best plan as an answer, checked. ``unused_reasons`` are by device type."""
        return make_report(
            self.model,
            self.options,
            best,
            bound_s=bound_s,
            unused_reasons=self.unusable | unused_reasons,
            rivals=rivals,
            wall_s=self.clock() - self.started_s,
        )


_NOT_LOOKED_AT = "the search ended before it was looked for"
"""Why a baseline has no plan where nobody knows."""
_REFINEMENT = 10_000
"""What `refine` may spend on small changes to good plans."""
_LEVELLED_DEVICES = 128
"""Devices up to which grids with unequal shares are tried too."""
_NARROW_OPERATIONS = 1e8
_NARROW_DEVICES = 20
"""Size of the families of a smaller space, and devices, up to which they are looked at."""
_FAR_FROM_BOUND = 1.2
"""Ratio of a plan's step time to the bound above which they are."""
_SLOW = 2.0
"""Longest step time, in units of the bound, that pipelines are sized for at first."""
_EXHAUSTIVE_DEVICES = 9
"""Devices up to which the exhaustive search is tried."""


def _kinds(cluster: Cluster, left_out: Collection[str], excluded: Collection[str]) -> list[Kind]:
    counts = Counter(d.type for d in cluster.devices.values() if d.id not in excluded)
    return [
        Kind(name, counts[name], cluster.device_types[name].memory_bytes)
        for name in sorted(counts)
        if name not in left_out
    ]
