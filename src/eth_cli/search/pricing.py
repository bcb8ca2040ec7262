"""The best pipeline at given prices of devices: a dynamic programme, and a bound on every pipeline.

A price for each resource (devices of a kind, room for groups of a width) makes pipelines compete:
which one does most samples within a time U for what its devices cost? `Pricing.explore`
answers with templates that do more than a given ratio of samples to price, or that *none* does,
which is what bounds the step time of every plan (`docs/search.md`, section 3).

A template of W seconds for one micro-batch there and back (transfers included), with m
micro-batches, takes at least ``W + a_q w_s`` for each of its stages s, of work w_s and at place q
from the end: ``a_q = m - (q + 1) / 2`` where m > q, and ``(m - 1) b_s`` instead of ``a_q w_s``
where not. The proof is in `docs/search.md`. With W in an interval and m in an interval this is a
limit on each stage alone, so the cheapest template is a shortest path over (place, first block).
Best-first search over the intervals of (m, W) makes it tight.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eth_cli.search.templates import Floats, Ints, Problem, Template, TemplateStage

Resource = tuple[int, int]
"""(kind, width): groups of so many devices of a kind that the nodes have room for."""

_RESOLUTION = 0.01
"""Width, relative to m and to the step time, down to which intervals are halved."""
_ALWAYS = 2**40
"""More micro-batches and places than there are."""
_OPEN = 8
"""Templates of intervals that are still open at the end that are told too."""
_TIGHTEST_PRICES = 4
"""Steps of the search for the price of time that makes a bound with a limit on W tightest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    """What `Pricing.explore` found."""

    is_proved: bool
    """Whether no template does more samples per unit of price than was asked about."""
    templates: tuple[Template, ...]
    """Those at which the search ended, best first."""
    num_nodes: int
    num_pruned: int
    """Intervals left out because their bound is not above the ratio asked about."""


class _Node(NamedTuple):
    """Templates of one micro-batch size with m in [low, high] and W in (shortest, longest]."""

    b: int
    low: int
    high: int
    shortest_s: float
    longest_s: float


class _Tables(NamedTuple):
    """Every possible stage of any option at one micro-batch size, in order of its first block."""

    option: Ints
    start: Ints
    stop: Ints
    work_s: Floats
    """Forward + backward."""
    backward_s: Floats
    chain_s: Floats
    """Work with the fastest transfers to any next stage."""
    room: Ints
    """Most micro-batches in flight; a large number where all of any pipeline have room."""
    update_s: Floats
    late_s: Floats
    """Longest backward time of what can lie before the stage, transfers included."""
    shortest_s: Floats
    """The shortest chain through all blocks that has this stage in it."""
    fastest_s: float
    """The shortest chain through all blocks."""


class _Limits(NamedTuple):
    """What the stages of one exploration may take, by entry of `_Tables`."""

    spare_s: Floats
    """Step time without the entry's update and the sync that nothing can hide."""
    price: Floats


class _Path(NamedTuple):
    """Stages over all blocks, by index into `_Tables`."""

    price: float
    entries: tuple[int, ...]
    chain_s: float


class Pricing:
    """The pricing problem of one search."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.max_stages = min(problem.num_blocks, sum(problem.counts))
        self._tables = {b: self._make_tables(b) for b in problem.micro_batch_sizes}

    def _make_tables(self, b: int) -> _Tables:
        problem = self.problem
        n = problem.num_blocks
        starts, stops = np.triu_indices(n + 1, k=1)
        costs = [problem.costs(option, b) for option in problem.options]
        forward = np.array([c.forward_s[starts, stops] for c in costs])
        backward = np.array([c.backward_s[starts, stops] for c in costs])
        room = np.array([c.in_flight[starts, stops] for c in costs])
        room = np.where(room >= self.max_stages, _ALWAYS, room)
        for o, option in enumerate(problem.options):
            plain = problem.plain(option)
            if plain is not None:
                room[o] = np.where(room[plain] >= room[o], 0, room[o])
        hops = problem.hops(b)
        work = forward + backward
        chain = work + np.where(stops == n, 0.0, hops.min(axis=1)[:, None])
        slowest = _longest_chains(starts, stops, backward, hops, n)
        before, after = _fastest_chains(starts, stops, chain.min(axis=0), n)
        pair, option_index = np.nonzero((room > 0).T & np.isfinite(chain).T)
        at = (option_index, pair)
        return _Tables(
            option_index,
            starts[pair],
            stops[pair],
            work[at],
            backward[at],
            chain[at],
            room[at],
            np.array([c.optimizer_s[starts, stops] for c in costs])[at],
            slowest[starts[pair]],
            before[starts[pair]] + chain[at] + after[stops[pair]],
            float(after[0]),
        )

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
        max_nodes: int,
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
            max_nodes: intervals to look at before it gives up.
            only_whole_batch: templates that do the whole batch alone.
            stop_after: templates above the ratio to find before it ends.
        """
        limits = {b: self._limits(b, time_s, self.prices_of(prices), sync_s) for b in self._tables}
        heap: list[tuple[float, int, _Node, _Path]] = []
        order = itertools.count()
        num_nodes = num_pruned = 0

        def push(node: _Node) -> None:
            nonlocal num_nodes, num_pruned
            num_nodes += 1
            # Only what is cheaper than this has a ratio above the one that is asked about.
            enough = node.b * node.high / ratio - base_price
            path = self._cheapest(node, limits[node.b], enough)
            if path is None:
                num_pruned += 1
                return
            at_most = node.b * node.high / max(path.price + base_price, 1e-300)
            heapq.heappush(heap, (-at_most, next(order), node, path))

        for b in self._tables:
            for node in self._roots(b, time_s, only_whole_batch):
                push(node)
        found: list[Template] = []
        is_proved = True
        while heap and num_nodes < max_nodes and len(found) < stop_after:
            _, _, node, path = heapq.heappop(heap)
            halves = self._halves(node, time_s)
            if not halves:
                is_proved = False
                template = self._template(node.b, path)
                if template not in found:
                    found.append(template)
            for half in halves:
                push(half)
        found += [self._template(node.b, path) for _, _, node, path in sorted(heap)[:_OPEN]]
        return Exploration(
            is_proved=is_proved and not heap,
            templates=tuple(dict.fromkeys(found)),
            num_nodes=num_nodes,
            num_pruned=num_pruned,
        )

    def _roots(self, b: int, time_s: float, only_whole_batch: bool) -> list[_Node]:
        most, rest = divmod(self.problem.global_batch_size, b)
        shortest = self._tables[b].fastest_s
        if shortest >= time_s:
            return []
        if only_whole_batch:
            return [] if rest else [_Node(b, most, most, shortest, time_s)]
        nodes = []
        low = 1
        while low <= most:
            high = min(most, max(low, 2 * low - 1))
            nodes.append(_Node(b, low, high, shortest, time_s))
            low = high + 1
        return nodes

    def _halves(self, node: _Node, time_s: float) -> list[_Node]:
        """The halves of the interval that leaves a node's bound looser; none: both are narrow."""
        by_m = node.high / node.low - 1
        by_w = (node.longest_s - node.shortest_s) / time_s
        if max(by_m, by_w) <= _RESOLUTION:
            return []
        if by_m >= by_w:
            middle = (node.low + node.high) // 2
            return [node._replace(high=middle), node._replace(low=middle + 1)]
        middle_s = math.sqrt(node.longest_s * node.shortest_s)
        return [node._replace(longest_s=middle_s), node._replace(shortest_s=middle_s)]

    # --- The dynamic programme -------------------------------------------------------------------

    def _limits(self, b: int, time_s: float, option_prices: Floats, sync_s: Floats) -> _Limits:
        tables = self._tables[b]
        exposed = sync_s[tables.start, tables.stop] - tables.backward_s - tables.late_s
        return _Limits(
            time_s - tables.update_s - np.maximum(exposed, 0.0), option_prices[tables.option]
        )

    def _cheapest(self, node: _Node, limits: _Limits, enough: float) -> _Path | None:
        """A bound on the price of every template of a node, and a path; None: it is ``enough``.

        Where the path's W is too long for the node, time gets a price too: for any such price p,
        ``price + p (W - longest)`` is no more than the price of a path that is within the node.
        """
        entries = self._entries(node, limits)
        path = self._shortest(node, entries, limits.price, 0.0, enough)
        if path is None or path.chain_s <= node.longest_s:
            return path
        best = path.price
        low, high, step = 0.0, None, max(path.price, 1e-12) / node.longest_s
        for _ in range(_TIGHTEST_PRICES):
            of_time = low + step if high is None else (low + high) / 2
            offset = of_time * node.longest_s
            tried = self._shortest(node, entries, limits.price, of_time, enough + offset)
            if tried is None:
                return None
            best = max(best, tried.price - offset)
            if tried.chain_s > node.longest_s:
                low, step = of_time, step * 4
            else:
                high, path = of_time, tried
        return path._replace(price=best)

    def _entries(self, node: _Node, limits: _Limits) -> tuple[Ints, Ints, Ints]:
        """Stages that a node's templates may have: index, first and last place from the end."""
        tables, m = self._tables[node.b], node.low
        spare = limits.spare_s - np.maximum(node.shortest_s, tables.shortest_s)
        last = np.where(tables.room >= m, _ALWAYS, tables.room)
        # m - (q + 1) / 2 <= spare / work, for places q < m; a little more for rounding.
        first = np.ceil(2 * (m - spare / tables.work_s * (1 + 1e-12)) - 1)
        first = np.clip(np.nan_to_num(first, nan=_ALWAYS), 1, _ALWAYS).astype(np.int64)
        late = (m - 1) * tables.backward_s <= spare * (1 + 1e-12)
        first = np.where((first >= m) & late, m, np.where(first >= m, _ALWAYS + 1, first))
        last = np.where(late, last, np.minimum(last, m - 1))
        (index,) = np.nonzero((first <= last) & (spare > 0))
        return index, first[index], last[index]

    def _shortest(
        self,
        node: _Node,
        entries: tuple[Ints, Ints, Ints],
        prices: Floats,
        price_of_time: float,
        enough: float,
    ) -> _Path | None:
        """The cheapest path of stages over all blocks, with a price of time; None: ``enough``.

        From the last stage to the first: ``value[start]`` is the least price of stages from there
        on, by place from the end, which tells what memory and the limits permit.
        """
        tables = self._tables[node.b]
        index, first, last = entries
        if not len(index):
            return None
        start, stop = tables.start[index], tables.stop[index]
        cost = prices[index] + price_of_time * tables.chain_s[index]
        rows = np.flatnonzero(np.diff(start, prepend=-1))
        row_starts = start[rows]
        value = np.full(self.problem.num_blocks + 1, np.inf)
        value[-1] = 0.0
        least = float(cost.min())
        best, levels = enough, [value]
        best_place = 0
        for place in range(1, self.max_stages + 1):
            if least * place >= best:
                break
            total = np.where((first <= place) & (place <= last), cost + value[stop], np.inf)
            value = np.full(self.problem.num_blocks + 1, np.inf)
            value[row_starts] = np.minimum.reduceat(total, rows)
            levels.append(value)
            if value[0] < best:
                best, best_place = float(value[0]), place
        if best_place == 0:
            return None
        chosen: list[int] = []
        at, chain_s = 0, 0.0
        for place in range(best_place, 0, -1):
            here = (start == at) & (first <= place) & (place <= last)
            (options,) = np.nonzero(here)
            totals = cost[options] + levels[place - 1][stop[options]]
            entry = int(options[int(totals.argmin())])
            chosen.append(int(index[entry]))
            chain_s += float(tables.chain_s[index[entry]])
            at = int(stop[entry])
        return _Path(best, tuple(chosen), chain_s)

    def _template(self, b: int, path: _Path) -> Template:
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

    # --- Pipelines of one option ---------------------------------------------------------------

    def uniform(self, b: int) -> list[Template]:
        """For every option and number of stages: the cut with the least slowest stage."""
        n = self.problem.num_blocks
        found = []
        for option in self.problem.options:
            costs = self.problem.costs(option, b)
            devices = self.problem.groups[option.kind, option.tensor_parallel]
            below = np.full(n + 1, np.inf)
            below[-1] = 0.0
            stops: list[Ints] = []
            for place in range(1, min(n, devices) + 1):
                need = min(place, self.problem.global_batch_size // b)
                work = np.where(costs.in_flight >= need, costs.work_s, np.inf)
                square = np.maximum(work, below)
                stop = square.argmin(axis=1)
                below = square[np.arange(n + 1), stop]
                stops.append(stop)
                if not np.isfinite(below).any():
                    break
                if np.isfinite(below[0]):
                    start, stages = 0, []
                    for at in reversed(stops):
                        stages.append(
                            TemplateStage(option.kind, start, int(at[start]), *option[1:])
                        )
                        start = int(at[start])
                    found.append(Template(b, tuple(stages)))
        return found


def _longest_chains(
    starts: Ints, stops: Ints, backward_s: Floats, hops: Floats, num_blocks: int
) -> Floats:
    """By block: no stages before it take longer for a backward, transfers included [s].

    Each block alone, on the option that is slowest for it, over the slowest transfers.
    """
    worst_hop = float(np.where(np.isfinite(hops), hops, 0.0).max(initial=0.0))
    slowest = np.where(np.isfinite(backward_s), backward_s, 0.0).max(axis=0)
    single = stops == starts + 1
    longest = np.zeros(num_blocks + 1)
    longest[stops[single]] = np.cumsum(slowest[single] + worst_hop)
    return longest


def _fastest_chains(
    starts: Ints, stops: Ints, chain_s: Floats, num_blocks: int
) -> tuple[Floats, Floats]:
    """By block: the least time of one micro-batch through all before it, and from it on [s]."""
    before, after = (np.full(num_blocks + 1, np.inf) for _ in range(2))
    before[0] = after[-1] = 0.0
    for block in range(1, num_blocks + 1):
        here = stops == block
        before[block] = (chain_s[here] + before[starts[here]]).min()
    for block in range(num_blocks - 1, -1, -1):
        here = starts == block
        after[block] = (chain_s[here] + after[stops[here]]).min()
    return before, after
