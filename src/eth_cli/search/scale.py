"""Plans for any number of devices by column generation, and the bound that certifies them.

Templates of one option start the master problem; its prices make `pricing` look for better, mixed
ones, until none is worth more than what is known. What the master would do with fractions of
pipelines is then made whole, placed and simulated. The cost grows with the kinds of devices and the
blocks, hardly with the number of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from eth_cli.search.exhaust import Best
from eth_cli.search.heuristic import offer_templates
from eth_cli.search.master import Column, Mix, best_mix, rounded, undominated
from eth_cli.search.pricing import Exploration, Pricing, Resource
from eth_cli.search.templates import Floats, Problem, Template
from eth_cli.search.timeline import Clock

_MARGIN = 1e-6
"""Relative: what rounding may add to a bound."""
_ROUNDS = 8
"""Rounds of column generation; most problems need two or three."""
_NODES = 200
"""Intervals that one round of pricing looks at."""
_BOUND_NODES = 500
"""Intervals that one attempt at a proof looks at."""
_SEEDS = 400
"""Templates of one option that the master starts with, best first."""
_PROOFS = 4
"""Attempts at a proof in each regime."""
_FIRST_PART = 0.03
"""Part below the master's time at which the first is made."""
_FINE = 1.008
"""Ratio of two times, one that failed and one that did not, between which none is looked for."""
_SAME = 1.003
"""Ratio below which two times of the master count as one."""
_AT_ONCE = 6
"""Templates that one round of pricing finds before the master is asked again."""
_SLACKS = (1.0, 1.002, 1.005, 1.01, 1.02, 1.035, 1.055, 1.08, 1.12, 1.18, 1.28, 1.4, 1.7, 2.2, 3.5)
"""Times that whole pipelines are made for, in units of the master's time."""
_MIXES = 4
"""Mixes of whole pipelines that are tried after the first."""
_COLUMNS = 32
"""Columns that the integer programme chooses from."""


class Regime(NamedTuple):
    """Plans by their number of pipelines, which decides what gradient sync they cannot avoid."""

    name: str
    most_pipelines: int
    sync_s: Floats
    """All-reduce of all gradients of a stage, by [start, stop] [s]."""
    only_whole_batch: bool = False
    """Whether a pipeline has to do the whole batch: the regime of one."""


class Scale:
    """Column generation for one problem."""

    def __init__(
        self,
        problem: Problem,
        best: Best,
        *,
        max_pipelines: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        self.best = best
        self.is_over = is_over
        self.pricing = Pricing(problem)
        self.available: dict[Resource, int] = dict(problem.groups)
        self.pool: dict[Template, _Entry] = {}
        self.regimes = self._regimes(max_pipelines)

    def _regimes(self, max_pipelines: int | None) -> list[Regime]:
        """One pipeline; so few that a node may hold all owners of a segment; more than that."""
        num_devices = sum(self.problem.counts)
        most = min(num_devices, max_pipelines or num_devices)
        few = min(most, self.problem.largest_node)
        regimes = [Regime("one", 1, self._sync_s(1, across_nodes=False), only_whole_batch=True)]
        if few > 1:
            regimes.append(Regime("few", few, self._sync_s(2, across_nodes=False)))
        if most > few:
            regimes.append(Regime("many", most, self._sync_s(few + 1, across_nodes=True)))
        return regimes

    def _sync_s(self, num_pipelines: int, *, across_nodes: bool) -> Floats:
        """All-reduce of all gradients of a stage in plans of at least so many pipelines [s].

        By [start, stop]. Every bucket has at least as many owners, and more take no less.
        """
        problem = self.problem
        times: dict[int, float] = {}
        seconds = np.zeros((problem.num_blocks + 1, problem.num_blocks + 1))
        for start in range(problem.num_blocks):
            for stop in range(start + 1, problem.num_blocks + 1):
                count = problem.model.profile.model.stage_parameters(start, stop)
                if count not in times:
                    times[count] = problem.best_ring_s(
                        count, num_pipelines, across_nodes=across_nodes
                    )
                seconds[start, stop] = times[count]
        return seconds

    @cached_property
    def speeds(self) -> dict[Resource, float]:
        """Samples a second of a device of each kind: prices where there are no better ones."""
        return {
            (kind, width): 1 / self.problem.seconds_a_sample(kind) if width == 1 else 0.0
            for kind, width in self.available
        }

    # --- Column generation ---------------------------------------------------------------------

    def run(self) -> float:
        """Offer the plans that come of it. No plan has a smaller step time than is returned [s]."""
        for b in self.problem.micro_batch_sizes:
            for template in self._seeds(self.pricing.uniform(b)):
                self._add(template)
        if not self.pool:
            return 0.0
        return min(self._run(regime) for regime in self.regimes)

    def _run(self, regime: Regime) -> float:
        target = _Target(self, regime)
        target.meet()
        for _ in range(_ROUNDS):
            if self.is_over():
                break
            before = target.time_s
            found = target.price_out(before / _SAME)
            added = [self._add(template) for template in found]
            if not any(added):
                break
            target.meet()
            if target.time_s * _SAME > before:
                break
        self._round(target)
        return target.bound_s()

    def _add(self, template: Template) -> bool:
        if template in self.pool:
            return False
        most = self.problem.max_micro_batches(template)
        if most < 1:
            return False
        self.pool[template] = _Entry(self, template, most)
        return True

    def _seeds(self, templates: Sequence[Template]) -> list[Template]:
        """Templates that do most a second for each device, by a formula; all if they are few."""

        def rate(template: Template) -> float:
            works = [
                float(
                    self.problem.costs(s.option, template.micro_batch_size).work_s[s.start, s.stop]
                )
                for s in template.stages
            ]
            width = sum(s.tensor_parallel for s in template.stages)
            return template.micro_batch_size / max(works) / width

        return sorted(templates, key=rate, reverse=True)[:_SEEDS]

    # --- Whole pipelines ------------------------------------------------------------------------

    def _round(self, target: _Target) -> None:
        """Offer whole pipelines for times from the master's up, most for the first that are enough.

        Real pipelines are slower than the master thinks, each mix by other transfers and sync, so
        several are placed and simulated.
        """
        seen: set[object] = set()
        failed_s = target.time_s
        num_found = 0
        for slack in _SLACKS:
            time_s = target.time_s * slack
            if time_s >= self.best.limit_s or num_found > _MIXES or self.is_over():
                return
            if not self._offer_rounded(target, time_s, seen):
                failed_s = time_s
                continue
            num_found += 1
            while num_found == 1 and time_s / failed_s > _FINE:
                middle_s = math.sqrt(failed_s * time_s)
                if self._offer_rounded(target, middle_s, seen):
                    time_s = middle_s
                else:
                    failed_s = middle_s

    def _offer_rounded(self, target: _Target, time_s: float, seen: set[object]) -> bool:
        """Offer whole pipelines that do the batch within a time; whether there are any."""
        chosen = rounded(
            target.worthwhile(time_s),
            self.available,
            self.problem.global_batch_size,
            target.regime.most_pipelines,
        )
        if chosen is None:
            return False
        templates = tuple(sorted(chosen))
        if templates not in seen:
            seen.add(templates)
            offer_templates(self.problem, templates, self.best)
        return True


class _Target:
    """The master problem of one regime: the least time at which a mix of the pool is enough."""

    def __init__(self, scale: Scale, regime: Regime) -> None:
        self.scale = scale
        self.regime = regime
        self.time_s = math.inf
        self.total = scale.problem.global_batch_size

    def columns(self, time_s: float) -> list[Column]:
        """What the pool's templates do within a time; dominated ones left out."""
        found = []
        for entry in self.scale.pool.values():
            if not entry.fits_cluster:
                continue
            micro_batches = entry.micro_batches(time_s, self.regime)
            if self.regime.only_whole_batch:
                whole, rest = divmod(self.total, entry.template.micro_batch_size)
                if rest or micro_batches < whole:
                    continue
                micro_batches = whole
            found.append(Column(entry.template, entry.uses, micro_batches))
        return undominated(found)

    def mix(self, time_s: float) -> Mix | None:
        """The best mix within a time."""
        columns = self.columns(time_s)
        return best_mix(columns, self.scale.available, self.regime.most_pipelines)

    def meet(self) -> None:
        """Set `time_s` to the least at which a mix does the batch, or infinity."""
        high = min(self.time_s, self.scale.best.time_s * 1.5)
        if not math.isfinite(high):
            high = max(e.slowest_s(self.regime) for e in self.scale.pool.values())
        if not self._is_enough(high):
            return
        low = high * 0.5
        while self._is_enough(low):
            high, low = low, low * 0.5
        while high / low > _SAME:
            middle = math.sqrt(high * low)
            if self._is_enough(middle):
                high = middle
            else:
                low = middle
        self.time_s = high

    def _is_enough(self, time_s: float) -> bool:
        mix = self.mix(time_s)
        return mix is not None and mix.samples >= self.total * (1 - _MARGIN)

    def worthwhile(self, time_s: float) -> list[Column]:
        """Columns closest to the best mix."""
        columns = self.columns(time_s)
        mix = best_mix(columns, self.scale.available, self.regime.most_pipelines)
        if mix is None:
            return columns[:_COLUMNS]

        def price_of_a_sample(column: Column) -> float:
            price = sum(mix.prices[r] * n for r, n in column.uses) + mix.base_price
            return price / column.samples

        return sorted(columns, key=price_of_a_sample)[:_COLUMNS]

    def price_out(self, time_s: float) -> tuple[Template, ...]:
        """Templates that are worth more than their price within a time."""
        if not math.isfinite(time_s):
            return ()
        found = self._explore(time_s, _NODES, stop_after=_AT_ONCE)
        return () if found is None else found.templates

    def bound_s(self) -> float:
        """No plan of the regime has a smaller step time than this or the best plan's [s].

        Tries a few times, nearer to the best plan after each proof and farther after each failure.
        """
        best_s = self.scale.best.time_s
        if not math.isfinite(best_s):
            return 0.0
        if self.time_s > best_s and self._is_proved(best_s):
            return best_s
        proved, failed = 0.0, min(self.time_s, best_s)
        part = _FIRST_PART
        for _ in range(_PROOFS):
            if self.scale.is_over():
                break
            time_s = failed * (1 - part) if proved == 0.0 else math.sqrt(proved * failed)
            if self._is_proved(time_s):
                proved = time_s
            else:
                failed = time_s
                part *= 2
            if proved and failed / proved < _FINE:
                break
        return proved

    def _is_proved(self, time_s: float) -> bool:
        """Whether no plan of the regime takes so little."""
        found = self._explore(time_s, _BOUND_NODES, stop_after=1)
        return found is not None and found.is_proved

    def _explore(self, time_s: float, max_nodes: int, stop_after: int) -> Exploration | None:
        """Whether any template does more for its price than the batch for that of all devices.

        If none does, no plan takes so little: ``samples <= ratio x (prices x devices + base price
        x pipelines)`` for any prices.
        """
        mix = self.mix(time_s)
        available, most = self.scale.available, self.regime.most_pipelines
        if mix is None or mix.samples <= 0:
            # Nothing of the pool is of use: any prices may do, such as devices by their speed.
            mix = Mix(0.0, self.scale.speeds, 0.0)
        worth = sum(mix.prices[r] * n for r, n in available.items()) + mix.base_price * most
        if worth <= 0:
            return None
        found = self.scale.pricing.explore(
            time_s,
            mix.prices,
            base_price=mix.base_price,
            ratio=self.total / worth * (1 - _MARGIN),
            sync_s=self.regime.sync_s,
            max_nodes=max_nodes,
            only_whole_batch=self.regime.only_whole_batch,
            stop_after=stop_after,
        )
        self.scale.best.prune("bound", found.num_pruned)
        return found


class _Entry:
    """A template of the pool with what is known of it."""

    def __init__(self, scale: Scale, template: Template, most: int) -> None:
        problem = scale.problem
        self.template = template
        self.most = most
        uses: Counter[Resource] = Counter()
        for stage in template.stages:
            uses.update(problem.takes(stage.option))
        self.uses = tuple(sorted(uses.items()))
        self.fits_cluster = all(n <= scale.available[r] for r, n in self.uses)
        self.clock = Clock(problem.times(template))
        self.update_s = problem.optimizer_s(template)
        self._after: dict[str, float] = {}

    def after_s(self, regime: Regime) -> float:
        """What comes after the pipeline's end at least: sync that nothing hides, and the update."""
        if regime.name not in self._after:
            times = self.clock.times
            exposed = later = 0.0
            for s, stage in enumerate(self.template.stages):
                hidden = times.backward_s[s] + later
                exposed = max(exposed, regime.sync_s[stage.start, stage.stop] - hidden)
                later += times.backward_s[s]
                if s < len(times.send_backward_s):
                    later += times.send_backward_s[s]
            self._after[regime.name] = exposed + self.update_s
        return self._after[regime.name]

    def slowest_s(self, regime: Regime) -> float:
        """Step time with all micro-batches that it has memory for [s]."""
        return self.clock(self.most) + self.after_s(regime)

    def micro_batches(self, time_s: float, regime: Regime) -> int:
        """Most micro-batches that it finishes within a step time."""
        return self.clock.most_within(time_s - self.after_s(regime), self.most)
