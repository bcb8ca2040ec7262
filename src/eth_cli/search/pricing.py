"""The best pipeline at given prices of devices: a dynamic programme, and a bound on every pipeline.

A price for each resource (devices of a kind, room for groups of a width) makes pipelines compete:
which one does most samples within a time U for what its devices cost? `Pricing.explore`
answers with templates that do more than a given ratio of samples to price, or that *none* does,
which is what bounds the step time of every plan (`docs/search.md`, section 3).

A template of W seconds for one micro-batch there and back (transfers included), with m
micro-batches, takes at least

    W + (m - 1) w - (min(m, q) - 1) g

for each of its stages, of work w, of which g the shorter of forward and backward, at place q from
the end (the proof is in `docs/search.md`). With ``p = (U - W) / (m - 1)``, the *pace*, that is a
limit on each stage alone, and the samples ``b m`` are a sum over the stages but for p: with p and
m in intervals the template of most surplus is a shortest path over (place, first block).
Best-first search over the intervals makes it tight.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eth_cli.search.shortest import Allowed, Path, Slowness, cheapest_path
from eth_cli.search.stages import (
    ALWAYS,
    ROUNDING,
    CutSet,
    Formulas,
    Limits,
    StageTables,
    after_s,
    limits_of,
    micro_batches_of,
    stage_tables,
)
from eth_cli.search.templates import Floats, Problem, Template, TemplateStage

Resource = tuple[int, int]
"""(kind, width): groups of so many devices of a kind that the nodes have room for."""

_RESOLUTION = 0.01
"""Width, relative to m and to the step time, down to which intervals are halved."""
_FIRST_PIECE = 1.4
"""Logarithm of the widest interval of paces to begin with."""
_WEIGHT_OF_M = 0.1
"""Effect of the width of an interval of m beside that of the pace, about q / m."""
_SLOWEST_PACE = 8.0
"""Slowest pace that pipelines are made for, in units of the shortest chain."""
_OPEN = 8
"""Templates of intervals that are still open at the end that are told too."""
_TIGHTEST_PRICES = 2
"""Steps of the search for the price of time that makes a bound with a limit on W tightest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    """What `Pricing.explore` found."""

    is_proved: bool
    """Whether no template does more samples per unit of price than was asked about."""
    templates: tuple[Template, ...]
    """Those at which the search ended, best first."""
    num_paths: int
    """Shortest paths that were looked for, which is what it costs."""
    num_pruned: int
    """Intervals left out because their bound is not above the ratio asked about."""


class _Node(NamedTuple):
    """Templates of one micro-batch size with m in [low, high] and a pace in [fast_s, slow_s]."""

    b: int
    low: int
    high: int
    fast_s: float
    slow_s: float


class _Bounded(NamedTuple):
    """The most surplus of any template of a node, and a path on the way to it."""

    surplus: float
    """Samples above the price that no template exceeds."""
    path: Path


class Pricing:
    """The pricing problem of one search."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._tables = {b: stage_tables(problem, b) for b in problem.micro_batch_sizes}
        self._num_paths = 0
        """Shortest paths looked for so far."""

    def prices_of(self, prices: Mapping[Resource, float]) -> Floats:
        """By option: what a stage of it costs."""
        return np.array(
            [
                sum(prices[r] * amount for r, amount in self.problem.takes(o).items())
                for o in self.problem.options
            ]
        )

    # --- Best-first search over intervals of m and W -------------------------------------------

    def explore(
        self,
        time_s: float,
        prices: Mapping[Resource, float],
        *,
        base_price: float = 0.0,
        ratio: float,
        sync_s: Floats,
        max_paths: int,
        only_whole_batch: bool = False,
        stop_after: int = 3,
    ) -> Exploration:
        """Whether any template within a time does more than so many samples for its price.

        Args:
            time_s: step time U that every pipeline, its sync and its update have to end within.
            prices: of each resource, not negative.
            base_price: price of a pipeline as such.
            ratio: samples per unit of price that are asked about.
            sync_s: all-reduce of all gradients of a stage that no plan avoids, by [start, stop];
                zeros where there is none [s].
            max_paths: shortest paths to look for before it gives up.
            only_whole_batch: templates that do the whole batch alone.
            stop_after: templates above the ratio to find before it ends.
        """
        # Prices in samples from here on: what a template does above its price is its surplus.
        limits = {
            b: limits_of(tables, ratio * self.prices_of(prices), sync_s)
            for b, tables in self._tables.items()
        }
        base = ratio * base_price
        heap: list[tuple[float, int, _Node, Path | None]] = []
        order = itertools.count()
        num_pruned, before = 0, self._num_paths
        found: dict[Template, None] = {}
        prunes = self.problem.pruning.price

        def push(node: _Node) -> None:
            nonlocal num_pruned
            limit = limits[node.b]
            bounded = self._most(node, limit, time_s, base)
            if bounded is None:
                if prunes:
                    num_pruned += 1
                else:  # It stays open, and is halved like others until it is narrow.
                    heapq.heappush(heap, (0.0, next(order), node, None))
                return
            path = bounded.path
            price = float(limit.price[list(path.entries)].sum()) + base
            if node.b * self._micro_batches(node.b, path, limit, time_s) > price * (1 + ROUNDING):
                found.setdefault(self._template(node.b, path))
            # Of large and small templates those that are worth most for their price come first.
            heapq.heappush(heap, (-bounded.surplus / (price + 1), next(order), node, path))

        is_proved, is_over = True, self.problem.is_over
        for b in self._tables:
            for node in self._roots(b, time_s, only_whole_batch):
                is_proved = is_proved and not is_over()
                if is_proved:
                    push(node)
        last = before + max_paths
        while heap and self._num_paths < last and len(found) < stop_after and not is_over():
            _, _, node, path = heapq.heappop(heap)
            halves = self._halves(node, path, time_s)
            if not halves:
                is_proved = False
            for half in halves:
                push(half)
        return Exploration(
            is_proved=is_proved and not heap and not found,
            templates=(
                *found,
                *(
                    self._template(node.b, path)
                    for _, _, node, path in sorted(heap)[:_OPEN]
                    if path is not None
                ),
            ),
            num_paths=self._num_paths - before,
            num_pruned=num_pruned,
        )

    def _roots(self, b: int, time_s: float, only_whole_batch: bool) -> list[_Node]:
        most, rest = divmod(self.problem.global_batch_size, b)
        tables = self._tables[b]
        spare_s = time_s - tables.fastest_s
        if spare_s <= 0 or (only_whole_batch and rest):
            return []
        nodes = []
        low = most if only_whole_batch else 1
        while low <= most:
            high = min(most, max(low, 2 * low - 1))
            if low == 1:
                nodes.append(_Node(b, 1, 1, 0.0, math.inf))
            else:
                fast_s, slow_s = tables.least_pace_s, spare_s / (low - 1)
                pieces = max(1, math.ceil(math.log(max(slow_s / fast_s, 1.0)) / _FIRST_PIECE))
                edges = np.geomspace(fast_s, max(slow_s, fast_s), pieces + 1).tolist()
                nodes += [
                    _Node(b, low, high, *pair)
                    for pair in itertools.pairwise(edges)
                    if pair[0] * (low - 1) <= spare_s
                ]
            low = high + 1
        return nodes

    def _halves(self, node: _Node, path: Path | None, time_s: float) -> list[_Node]:
        """The halves of the interval that leaves a node's bound looser; none: both are narrow."""
        if node.low == 1:
            return []
        by_pace = node.slow_s / node.fast_s - 1
        by_m = (node.high - node.low) / node.low
        if by_pace <= _RESOLUTION and node.low == node.high:
            return []
        # The number of micro-batches matters less, except that it has to be whole.
        if by_pace > _RESOLUTION and by_pace > by_m * _WEIGHT_OF_M:
            middle_s = math.sqrt(node.fast_s * node.slow_s)
            return [node._replace(slow_s=middle_s), node._replace(fast_s=middle_s)]
        chain_s = self._tables[node.b].fastest_s if path is None else path.chain_s
        at_most = 1 + (time_s - chain_s) / node.fast_s
        middle = min(max(math.floor(at_most), node.low), node.high - 1)
        if node.low == node.high:
            return []
        spare_s = time_s - self._tables[node.b].fastest_s
        return [
            half
            for half in (node._replace(high=middle), node._replace(low=middle + 1))
            if half.fast_s * (half.low - 1) <= spare_s
        ]

    # --- The dynamic programme -------------------------------------------------------------------

    def _micro_batches(self, b: int, path: Path, limits: Limits, time_s: float) -> int:
        """Most micro-batches that the stages of a path do by the formula within a time."""
        tables = self._tables[b]
        entries = np.array(path.entries)
        after = after_s(tables, limits, path.chain_s)[entries]
        places = np.arange(len(entries), 0, -1)
        found = micro_batches_of(tables, entries, places, time_s - path.chain_s - after)
        return int(min(found.min(), self.problem.global_batch_size // b))

    def _most(self, node: _Node, limits: Limits, time_s: float, base: float) -> _Bounded | None:
        """A bound on the surplus of every template of a node, and a path; None: none is above 0.

        With W a template's chain and p = (U - W) / (m - 1) its pace, at least ``fast``,

            m <= 1 + (U - W) / fast,   m <= high,   W <= U - fast (low - 1)

        A price of time t between 0 and b / fast weighs the first two, a larger one the last: the
        surplus ``b m - price`` is at most ``constant(t) - min over paths of (t W + price)``. Of the
        first, ``(U - W) / fast - (U - W) / p`` can be taken off, stage by stage (`Slowness`).
        """
        tables = self._tables[node.b]
        allowed, longest_s = self._allowed(node, limits, time_s)
        natural = node.b / node.fast_s if node.low > 1 else 0.0
        shortest_s = time_s - node.fast_s * (node.high - 1) if node.low > 1 else 0.0

        def solve(of_time: float) -> _Bounded | None:
            constant = node.b * node.high - base + min(of_time, natural) * shortest_s
            constant += max(of_time - natural, 0.0) * longest_s
            slowness = None
            if natural:
                price = min(of_time / natural, 1.0) * node.b * (node.low - 1)
                slowness = Slowness(price, node.fast_s, node.low)
            path = self._cheapest(tables, allowed, limits.price, of_time, constant, slowness)
            return None if path is None else _Bounded(constant - path.cost, path)

        found = solve(natural)
        if found is None or shortest_s <= found.path.chain_s <= longest_s:
            return found
        is_short = found.path.chain_s < shortest_s
        limit_s = shortest_s if is_short else longest_s
        low, high = (0.0, natural) if is_short else (natural, math.inf)
        step = max(natural, found.surplus / longest_s)
        for _ in range(_TIGHTEST_PRICES):
            of_time = low + step if math.isinf(high) else (low + high) / 2
            tried = solve(of_time)
            if tried is None:
                return None
            found = min(found, tried, key=lambda f: f.surplus)
            if tried.path.chain_s > limit_s:
                low, step = of_time, of_time * 3
            else:
                high = of_time
        return found

    def _cheapest(
        self,
        tables: StageTables,
        allowed: Allowed,
        prices: Floats,
        price_of_time: float,
        enough: float,
        slowness: Slowness | None = None,
    ) -> Path | None:
        self._num_paths += 1
        return cheapest_path(
            tables,
            allowed,
            prices,
            price_of_time=price_of_time,
            slowness=slowness,
            enough=enough,
            max_stages=self.problem.max_stages,
        )

    def _allowed(self, node: _Node, limits: Limits, time_s: float) -> tuple[Allowed, float]:
        """Stages that a node's templates may have, and their longest chain [s]."""
        tables = self._tables[node.b]
        low, high = node.low, node.high
        longest_s = time_s if low == 1 else time_s - node.fast_s * (low - 1)
        after = after_s(tables, limits, longest_s)
        last = np.where(tables.room >= low, ALWAYS, tables.room)
        fits = tables.shortest_s + after <= time_s * (1 + ROUNDING)
        if low == 1:
            first = np.ones_like(last)
        else:
            fits &= tables.shortest_s <= longest_s * (1 + ROUNDING)
            slow = node.slow_s * (1 + ROUNDING)
            # (m - 1) w - (q - 1) g <= (m - 1) p - after: m at one of its ends allows most.
            above = tables.work_s - slow
            least = np.minimum(above * (low - 1), above * (high - 1)) + after
            first = 1 + np.ceil(least / tables.part_s)
            first = np.clip(first, 1, ALWAYS).astype(np.int64)
            late = tables.work_s - tables.part_s <= slow - after / (high - 1)
            first = np.where(late, np.minimum(first, low), first)
            last = np.where(late, last, np.minimum(last, high - 1))
        (index,) = np.nonzero((first <= last) & fits)
        return Allowed(index, first[index], last[index]), longest_s

    def _template(self, b: int, path: Path) -> Template:
        tables = self._tables[b]
        stages = []
        for entry in path.entries:
            option = self.problem.options[int(tables.option[entry])]
            stages.append(
                TemplateStage(
                    option.kind,
                    int(tables.start[entry]),
                    int(tables.stop[entry]),
                    option.tensor_parallel,
                    option.recompute,
                )
            )
        return Template(b, tuple(stages))

    def formulas(self, sync_s: Floats) -> Formulas:
        """An empty table of templates by formula.

        Args:
            sync_s: all-reduce of all gradients of a stage that no plan avoids, by [start, stop].
        """
        return Formulas(self.problem, self._tables, sync_s)

    # --- Good pipelines, without a proof --------------------------------------------------------

    def at_paces(
        self,
        time_s: float,
        prices: Mapping[Resource, float],
        *,
        hops: Mapping[int, Floats],
        sync_s: Floats,
        num_paces: int,
        options: Collection[int],
        cuts: CutSet | None = None,
    ) -> list[Template]:
        """For a number of paces and every micro-batch size, the pipeline of most surplus.

        Args:
            time_s: step time that it has to end within.
            prices: of each resource [samples].
            hops: by micro-batch size, transfers both ways over a boundary, by [option, option] [s].
            sync_s: all-reduce of a stage's gradients, by [start, stop] [s].
            num_paces: paces that are tried, from the fastest that any template has.
            options: that stages may be of, by index.
            cuts: where stages may begin; None: anywhere.

        Raises:
            SearchOverError: the time of the search was over.
        """
        found: dict[Template, None] = {}
        for b, known in self._tables.items():
            tables = known._replace(hops_s=hops[b][np.ix_(known.member, known.member)])
            limits = limits_of(tables, self.prices_of(prices), sync_s)
            may_have = np.isin(tables.option, list(options))
            if cuts is not None:
                may_have &= cuts.stages(tables)
            spare_s = time_s - tables.fastest_s
            if spare_s <= 0 or not np.isfinite(tables.least_pace_s):
                continue
            slowest_s = max(tables.least_pace_s, min(spare_s, _SLOWEST_PACE * tables.fastest_s))
            most = self.problem.global_batch_size // b
            for pace_s in np.geomspace(tables.least_pace_s, slowest_s, num_paces).tolist():
                self.problem.check_over()
                m = min(most, 1 + int(spare_s / pace_s))
                if m < 2:
                    continue
                node = _Node(b, m, m, pace_s, pace_s)
                allowed, _ = self._allowed(node, limits, time_s)
                kept = may_have[allowed.entries]
                allowed = Allowed(*(part[kept] for part in allowed))
                path = self._cheapest(tables, allowed, limits.price, b / pace_s, math.inf)
                if path is not None:
                    found.setdefault(self._template(b, path))
        return list(found)
