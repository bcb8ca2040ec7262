"""Good plans for any number of devices: mixes of pipelines as they would lie in the nodes.

Column generation as in `certificate`, but for plans, not for proofs: a column is a template with a
number of copies laid out together, and its time is the estimate of `layouts`, transfers and sync
over shared NICs included. Whole pipelines of the best mixes, and of every single template that
does well when all devices repeat it, are placed and simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from eth_cli.search.bundles import Bundles, cuts_of
from eth_cli.search.exhaust import Best
from eth_cli.search.heuristic import offer_bundles, uniform
from eth_cli.search.layouts import Bundle, LaidOut, Layouts
from eth_cli.search.master import Column, Mix, best_mix, least_time_s, rounded
from eth_cli.search.pricing import Pricing
from eth_cli.search.stages import CutSet
from eth_cli.search.templates import Problem, Template

_ALIKE = 3
"""Pipelines of one option of each kind and number of stages that it begins with."""
_ROUNDS = 3
"""Rounds of column generation."""
_FAR = 4.0
"""Ratio to the step time that is expected at which pipelines are made where no mix is enough."""
_PACES = 8
"""Paces that a round looks for templates at, for each number of copies."""
_SAME = 1.003
"""Ratio below which two times count as one."""
_SLACKS = (1.0, 1.005, 1.01, 1.02, 1.035, 1.055, 1.08, 1.12, 1.18, 1.28, 1.4, 1.7, 2.2, 3.5)
"""Times that whole pipelines are made for, in units of the best mix's time."""
_WHOLE = 4
"""Mixes of whole pipelines that are simulated."""
_REPEATED = 4
"""Plans of one template repeated that are simulated."""
_PROMISING = 1.1
"""Ratio to the best plan's time up to which an estimate is worth a simulation."""
_CUTS = 6
"""Sets of cuts that are tried for all pipelines."""
_LEADING = 2
"""Templates of a mix whose cuts are tried."""
_LEFT_OVER = 0.06
"""Part of the devices in use below which a sort of pipelines is one of those left over."""
_COLUMNS = 32
"""Columns that the integer programme chooses from."""
_MARGIN = 1e-6
"""Relative: what rounding may do to a number of samples."""


class _Offered(NamedTuple):
    """A plan that was simulated."""

    time_s: float
    templates: list[Template]
    """Those that take most devices."""


class Mixes:
    """The search for one problem."""

    def __init__(
        self,
        problem: Problem,
        pricing: Pricing,
        best: Best,
        *,
        about_s: float,
        max_pipelines: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        self.pricing = pricing
        self.best = best
        self.layouts = Layouts(problem)
        self.available = dict(problem.groups)
        self.about_s = about_s
        self.max_pipelines = max_pipelines
        self.is_over = is_over
        self.pool = Bundles()
        self.total = problem.global_batch_size
        self.options: Collection[int] = ()
        """What stages of new templates may be of, by index."""
        self.cuts: CutSet | None = None
        """Where stages may begin; None: anywhere."""

    def run(self, spaces: Sequence[Collection[int]]) -> None:
        """Offer plans of pipelines whose stages are of some options, by index, space after space.

        Of a larger space less is looked at; so that what a search of a smaller one finds is not
        lost, smaller ones come first. Templates stay known.
        """
        found: list[_Offered] = []
        most = self.max_pipelines
        for options in spaces:
            if self.is_over():
                return
            self.options = options
            for template in self._promising():
                self._add(template)
            # A limit on the number of pipelines leaves prices of devices that make few templates.
            self.max_pipelines = None
            time_s = self._generate(_ROUNDS)
            if most is not None:
                self.max_pipelines = most
                time_s = self._generate(_ROUNDS)
            found += self._offer_repeated()
            found += self._offer_whole(time_s, limit=_PROMISING)
        # Pipelines that are cut at different blocks have many small segments, which wait for each
        # other. So the best plans' cuts are tried for all of their pipelines.
        best = [t for offered in sorted(found, key=lambda o: o.time_s) for t in offered.templates]
        for blocks in list(dict.fromkeys(cuts_of(t) for t in best))[:_CUTS]:
            for is_exact in (False, True):
                self.cuts = CutSet(blocks, is_exact)
                self._offer_whole(self._generate(1))
        self.cuts = None

    def _promising(self) -> list[Template]:
        """Pipelines of one option that do most for their devices within a time, by formula.

        For every kind and number of stages the best few: what transfers and sync make of them, and
        what other kinds are worth, is not known yet.
        """
        problem = self.problem
        nothing = np.zeros((problem.num_blocks + 1, problem.num_blocks + 1))
        formulas = self.pricing.formulas(nothing)
        options = [problem.options[o] for o in self.options]
        templates = [t for b in problem.micro_batch_sizes for t in uniform(problem, b, options)]
        known = [t for t in templates if formulas.add(t)]
        numbers = formulas.micro_batches(self.about_s).tolist()
        ranked: dict[tuple[int, int], list[tuple[float, Template]]] = {}
        for template, number in zip(known, numbers, strict=True):
            devices = sum(stage.tensor_parallel for stage in template.stages)
            rate = number * template.micro_batch_size / devices
            if rate > 0:
                key = (template.stages[0].kind, len(template.stages))
                ranked.setdefault(key, []).append((-rate, template))
        return [template for found in ranked.values() for _, template in sorted(found)[:_ALIKE]]

    def _generate(self, rounds: int) -> float:
        """Add templates until none is worth more; the least time at which a mix is enough [s]."""
        time_s = self._least_time_s(math.inf)
        far_s = min(self.best.time_s, self.about_s * _FAR)
        for _ in range(rounds):
            if self.is_over():
                break
            before = time_s
            if not self._price_out(time_s if math.isfinite(time_s) else far_s):
                break
            time_s = self._least_time_s(time_s)
            if math.isfinite(before) and time_s * _SAME > before:
                break
        return time_s

    def _add(self, template: Template, numbers: Sequence[int] | None = None) -> bool:
        added = False
        for copies in numbers or self.layouts.numbers_of_copies():
            bundle = Bundle(template, copies)
            if bundle in self.pool:
                continue
            laid_out = self.layouts.lay_out(bundle)
            if laid_out is not None and all(n <= self.available[r] for r, n in laid_out.uses):
                self.pool.add(laid_out)
                added = True
        return added

    # --- The master problem ---------------------------------------------------------------------

    def _columns(self, time_s: float) -> list[Column[LaidOut]]:
        return self.pool.columns(time_s, self.cuts)

    def _mix(self, time_s: float) -> Mix | None:
        return best_mix(self._columns(time_s), self.available, self.max_pipelines)

    def _samples(self, time_s: float) -> float:
        mix = self._mix(time_s)
        return 0.0 if mix is None else mix.samples

    def _least_time_s(self, known_s: float) -> float:
        """The least time at which a mix does the batch; infinity where none does by ``known_s``."""
        high, enough = known_s, self.total * (1 - _MARGIN)
        if math.isinf(high):
            longest_s = max((p.time_s(p.most) for p in self.pool), default=0.0)
            high = min(self.best.time_s * 2.0, longest_s)
        return least_time_s(self._samples, enough, high, within=_SAME) or math.inf

    def _price_out(self, time_s: float) -> bool:
        """Add templates that are good at the prices of a time; whether there are any new ones."""
        mix = self._mix(time_s)
        if mix is None or mix.samples <= 0:
            # Nothing of the pool is of use yet: devices by their speed.
            speeds = {
                (kind, width): time_s / self.problem.seconds_a_sample(kind) if width == 1 else 0.0
                for kind, width in self.available
            }
            mix = Mix(0.0, speeds, 0.0)
        added = False
        numbers = self.layouts.numbers_of_copies()
        for copies in dict.fromkeys((numbers[0], numbers[-1])):
            found = self.pricing.at_paces(
                time_s,
                mix.prices,
                hops={b: self.layouts.hops(b, copies) for b in self.problem.micro_batch_sizes},
                sync_s=self.layouts.sync_s(copies),
                num_paces=_PACES,
                options=self.options,
                cuts=self.cuts,
            )
            for template in found:
                added = self._add(template) or added
        return added

    # --- Whole pipelines ------------------------------------------------------------------------

    def _offer_repeated(self) -> list[_Offered]:
        """Offer the best plans of one template, as many as the devices have room for."""
        estimates = []
        for laid_out in self.pool:
            number = min(self.available[r] // n for r, n in laid_out.uses)
            if self.max_pipelines is not None:
                number = min(number, self.max_pipelines)
            size = laid_out.bundle.template.micro_batch_size
            number = min(number, self.total // size)
            micro_batches = math.ceil(self.total / (size * number))
            if micro_batches <= laid_out.most:
                estimates.append((laid_out.time_s(micro_batches), laid_out, number))
        estimates.sort(key=lambda e: (e[0], e[1].bundle))
        # Of copies laid out in several ways and of like templates only the best.
        distinct: dict[object, tuple[LaidOut, int]] = {}
        for time_s, laid_out, number in estimates:
            if time_s < self.best.limit_s * _PROMISING and len(distinct) < _REPEATED:
                distinct.setdefault((laid_out.uses, time_s), (laid_out, number))
        return [
            _Offered(
                offer_bundles(self.problem, [laid_out] * number, self.best),
                [laid_out.bundle.template],
            )
            for laid_out, number in distinct.values()
            if not self.is_over()
        ]

    def _offer_whole(self, least_s: float, *, limit: float = 1.0) -> list[_Offered]:
        """Offer whole pipelines of the best mixes, for times from the least up.

        Args:
            limit: ratio to the best plan's time up to which mixes are of interest.
        """
        seen: set[object] = set()
        found = []
        for slack in _SLACKS:
            time_s = least_s * slack
            if time_s >= self.best.limit_s * limit or len(seen) >= _WHOLE or self.is_over():
                break
            chosen = rounded(
                self._worthwhile(time_s), self.available, self.total, self.max_pipelines
            )
            if chosen is None:
                continue
            key = tuple(sorted(p.bundle for p in chosen))
            if key not in seen:
                seen.add(key)
                variants = dict.fromkeys((tuple(chosen), self._leading(chosen)))
                found_s = min(offer_bundles(self.problem, p, self.best) for p in variants)
                found.append(_Offered(found_s, _most_devices(chosen)))
        return found

    def _leading(self, chosen: Sequence[LaidOut]) -> tuple[LaidOut, ...]:
        """The pipelines without those few of other sorts that devices are left over for.

        Cut elsewhere, they make everybody's gradient sync wait for more than they are worth.
        """
        numbers = Counter(p.bundle.template for p in chosen)
        devices = {t: n * sum(s.tensor_parallel for s in t.stages) for t, n in numbers.items()}
        least = sum(devices.values()) * _LEFT_OVER
        return tuple(p for p in chosen if devices[p.bundle.template] >= least)

    def _worthwhile(self, time_s: float) -> list[Column[LaidOut]]:
        """Columns closest to the best mix."""
        columns = self._columns(time_s)
        mix = best_mix(columns, self.available, self.max_pipelines)
        if mix is None:
            return columns[:_COLUMNS]

        def price_of_a_sample(column: Column[LaidOut]) -> float:
            price = sum(mix.prices[r] * n for r, n in column.uses) + mix.base_price
            return price / column.samples

        return sorted(columns, key=price_of_a_sample)[:_COLUMNS]


def _most_devices(pipelines: Sequence[LaidOut]) -> list[Template]:
    """The templates that take most devices, most first."""
    devices = Counter[Template]()
    for p in pipelines:
        devices[p.bundle.template] += sum(s.tensor_parallel for s in p.bundle.template.stages)
    return [template for template, _ in devices.most_common(_LEADING)]
