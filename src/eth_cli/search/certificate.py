"""The certificate: no plan of any number of devices has a smaller step time than this.

Column generation of a relaxed problem. A template does as many micro-batches within a time U as the
formula of `pricing` lets it, over the fastest links; fractions of pipelines are allowed; gradient
sync is what no plan of so many pipelines can avoid. The least U at which that does the batch is
below every plan's step time. `master` tells the least U for the templates that are known, and its
prices; `pricing` adds the templates that are worth more, or proves that there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eth_cli.search.master import Column, Mix, best_mix, least_time_s, undominated
from eth_cli.search.pricing import Exploration, Pricing, Resource
from eth_cli.search.templates import Floats, Problem, Template

_MARGIN = 1e-6
"""Relative: what rounding may add to a bound."""
_PARTS = (0.06, 0.03, 0.015)
"""Parts below the known templates' least time at which proofs are tried, in turn."""
_WIDER = (0.12, 0.25, 0.5)
"""Where the first of them fails."""
_ENOUGH_KNOWN = 0.7
"""Part of the batch that the known templates have to do for their prices to be of use."""
_BY_OTHERS = (0.0, 0.03)
"""Parts below the bound of one regime at which its prices are tried for another."""
_ROUNDS = 4
"""Times that templates are added for each."""
_PATHS = 600
"""Shortest paths that one attempt looks for."""
_ALL_WORK = 16_000
"""Shortest paths that all attempts look for, times the options of a stage."""
_WORTH_IT = 0.25
"""Part of the gap that a proof has to be able to close to be tried."""
_AT_ONCE = 16
"""Templates that one attempt adds."""
_SAME = 1.001
"""Ratio below which two times count as one."""


class Regime(NamedTuple):
    """Plans by their number of pipelines, which decides what gradient sync they cannot avoid."""

    most_pipelines: int
    sync_s: Floats
    """All-reduce of all gradients of a stage, by [start, stop] [s]."""
    only_whole_batch: bool = False
    """Whether a pipeline has to do the whole batch: the regime of one."""


def regimes(problem: Problem, max_pipelines: int | None) -> list[Regime]:
    """One pipeline; so few that a node may hold all owners of a segment; more than that."""
    num_devices = sum(problem.counts)
    most = min(num_devices, max_pipelines or num_devices)
    few = min(most, problem.largest_node)
    found = [Regime(1, _sync_s(problem, 1, across_nodes=False), only_whole_batch=True)]
    if few > 1:
        found.append(Regime(few, _sync_s(problem, 2, across_nodes=False)))
    if most > few:
        found.append(Regime(most, _sync_s(problem, few + 1, across_nodes=True)))
    return found


def _sync_s(problem: Problem, num_pipelines: int, *, across_nodes: bool) -> Floats:
    """All-reduce of all gradients of a stage in plans of at least so many pipelines [s].

    By [start, stop]. Every bucket has at least as many owners, and more take no less.
    """
    times: dict[int, float] = {}
    seconds = np.zeros((problem.num_blocks + 1, problem.num_blocks + 1))
    for start in range(problem.num_blocks):
        for stop in range(start + 1, problem.num_blocks + 1):
            count = problem.model.profile.model.stage_parameters(start, stop)
            if count not in times:
                times[count] = problem.best_ring_s(count, num_pipelines, across_nodes=across_nodes)
            seconds[start, stop] = times[count]
    return seconds


def certified_bound_s(
    pricing: Pricing,
    templates: Iterable[Template],
    *,
    best_s: float,
    known_s: float = 0.0,
    max_pipelines: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
    prune: Callable[[str, int], None] = lambda rule, number: None,
) -> float:
    """No plan has a smaller step time than this or ``best_s`` [s].

    Args:
        templates: to begin with; the better, the quicker.
        best_s: step time of the best plan known.
        known_s: a bound that is known already: less needs no proof.
        is_over: whether to stop with what is proved so far.
        prune: told how many intervals or templates a rule left out.
    """
    known = list(templates)
    if not math.isfinite(best_s):
        return 0.0
    budget = _Budget(_ALL_WORK // len(pricing.problem.options))
    relaxed = [
        _Relaxed(
            pricing,
            regime,
            known,
            budget,
            best_s=best_s,
            known_s=known_s,
            is_over=is_over,
            prune=prune,
        )
        for regime in regimes(pricing.problem, max_pipelines)
    ]
    # The bound is the least of all: the others need no proof of more than that, and the prices
    # that prove one are often good for the others too.
    relaxed.sort(key=lambda r: r.least_s)
    if known_s and relaxed[0].least_s < known_s * (best_s / known_s) ** _WORTH_IT:
        return known_s
    bound_s, prices = best_s, list[Mix]()
    for problem in relaxed:
        bound_s = min(bound_s, problem.bound_s(prices, enough_s=bound_s))
        if bound_s <= known_s:
            return known_s
        prices = problem.proofs[-1:] or prices
    return bound_s


@dataclass
class _Budget:
    """Shortest paths that are left to look for."""

    paths: int


class _Relaxed:
    """The relaxed problem of one regime."""

    def __init__(
        self,
        pricing: Pricing,
        regime: Regime,
        templates: Iterable[Template],
        budget: _Budget,
        *,
        best_s: float,
        known_s: float,
        is_over: Callable[[], bool],
        prune: Callable[[str, int], None],
    ) -> None:
        self.budget = budget
        self.known_s = known_s
        self.pricing = pricing
        self.problem = pricing.problem
        self.regime = regime
        self.is_over = is_over
        self.prune = prune
        self.total = self.problem.global_batch_size
        self.available = dict(self.problem.groups)
        self.pool: dict[Template, tuple[tuple[Resource, int], ...]] = {}
        self._formulas = pricing.formulas(regime.sync_s)
        for template in templates:
            self._add(template)
        self.proofs: list[Mix] = []
        """Prices that proved a bound, in turn."""
        self.least_s = self._least_s(best_s)

    def _add(self, template: Template) -> bool:
        if template in self.pool or not self._formulas.add(template):
            return False
        self.pool[template] = self.problem.uses(template)
        return True

    # --- The master problem ---------------------------------------------------------------------

    def _mix(self, time_s: float) -> Mix | None:
        columns = []
        numbers = self._formulas.micro_batches(time_s).tolist()
        for (template, uses), number in zip(self.pool.items(), numbers, strict=True):
            if self.regime.only_whole_batch:
                whole, rest = divmod(self.total, template.micro_batch_size)
                number = 0 if rest or number < whole else whole
            columns.append(Column(template, template.micro_batch_size, uses, number))
        if self.problem.pruning.dominated:
            useful = undominated(columns)
            num_all = sum(column.micro_batches > 0 for column in columns)
            self.prune("dominated", num_all - len(useful))
        else:
            useful = [column for column in columns if column.micro_batches]
        return best_mix(useful, self.available, self.regime.most_pipelines)

    def _samples(self, time_s: float) -> float:
        mix = self._mix(time_s)
        return 0.0 if mix is None else mix.samples

    def _least_s(self, high: float) -> float:
        """The least time up to ``high`` at which the known templates do the batch, or ``high``."""
        enough = self.total * (1 - _MARGIN)
        return least_time_s(self._samples, enough, high, within=_SAME) or high

    # --- Proofs ---------------------------------------------------------------------------------

    def bound_s(self, prices: Sequence[Mix], *, enough_s: float) -> float:
        """No plan of the regime has a smaller step time than this, or ``enough_s`` is less [s].

        Args:
            prices: that proved a bound of other regimes.
        """
        if self.least_s >= enough_s:
            mix = self._mix(enough_s)
            knows_enough = mix is not None and mix.samples >= self.total * _ENOUGH_KNOWN
            if knows_enough and self._is_proved(enough_s, mix):
                return enough_s
        others_s = self._proved_by_s(prices, enough_s)
        if others_s >= enough_s * (1 - _BY_OTHERS[-1]):
            return others_s
        proved = 0.0
        for part in _PARTS:
            if self.least_s * (1 - part) > self.known_s and not self._is_proved_below(part):
                break
            proved = self.least_s * (1 - part)
            if proved >= enough_s:
                return proved
        for part in _WIDER if not proved else ():
            time_s = self.least_s * (1 - part)
            if time_s <= self.known_s:
                return self.known_s
            if self._is_proved(time_s):
                return time_s
        return proved

    def _proved_by_s(self, prices: Sequence[Mix], most_s: float) -> float:
        """The largest time up to ``most_s``, or a part of it, that other prices prove [s]."""
        for part in _BY_OTHERS:
            for mix in prices:
                if self._is_proved(most_s * (1 - part), mix):
                    return most_s * (1 - part)
        return 0.0

    def _is_proved_below(self, part: float) -> bool:
        """Whether no plan takes less than that part below the known templates' least time.

        Adds the templates that stand against it, until there are no more of them.
        """
        for _ in range(_ROUNDS):
            if self.is_over() or self.budget.paths <= 0:
                break
            found = self._explore(self.least_s * (1 - part))
            if found.is_proved:
                return True
            before = self.least_s
            added = [self._add(template) for template in found.templates]
            if any(added):
                self.least_s = self._least_s(before)
            if before / self.least_s < _SAME:
                break
        return False

    def _is_proved(self, time_s: float, mix: Mix | None = None) -> bool:
        return not self.is_over() and self._explore(time_s, mix).is_proved

    def _explore(self, time_s: float, mix: Mix | None = None) -> Exploration:
        """Whether any template does more for its price than the batch for that of all devices.

        If none does, no plan takes so little: ``samples <= ratio x (prices x devices + base price
        x pipelines)`` for any prices.
        """
        mix = mix or self._mix(time_s)
        most = self.regime.most_pipelines
        if mix is None or mix.samples <= 0:
            # Nothing of the pool is of use: any prices may do, such as devices by their speed.
            speeds = {
                (kind, width): 1 / self.problem.seconds_a_sample(kind) if width == 1 else 0.0
                for kind, width in self.available
            }
            mix = Mix(0.0, speeds, 0.0)
        worth = sum(mix.prices[r] * n for r, n in self.available.items()) + mix.base_price * most
        if worth <= 0:
            return Exploration(is_proved=False, templates=(), num_paths=0, num_pruned=0)
        found = self.pricing.explore(
            time_s,
            mix.prices,
            base_price=mix.base_price,
            ratio=self.total / worth * (1 - _MARGIN),
            sync_s=self.regime.sync_s,
            max_paths=min(_PATHS, self.budget.paths),
            only_whole_batch=self.regime.only_whole_batch,
            stop_after=_AT_ONCE,
        )
        self.budget.paths -= found.num_paths
        if found.is_proved:
            self.proofs.append(mix)
        self.prune("price", found.num_pruned)
        return found
