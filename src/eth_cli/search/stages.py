"""Every possible stage of a problem, in arrays, and what a stage alone says of a pipeline's time.

The formula of `micro_batches_of` is what `pricing` finds pipelines by and `certificate` bounds them
with: a template of W seconds for one micro-batch there and back takes at least
``W + (m - 1) w - (min(m, q) - 1) g`` for each of its stages, of work w, of which g the shorter of
forward and backward, at place q from the end (`docs/search.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.search.templates import Floats, Ints, Problem, Template

ALWAYS = 2**40
"""More micro-batches and places than there are."""
ROUNDING = 1e-12
"""Relative: what rounding may do to a limit."""


class StageTables(NamedTuple):
    """Every possible stage of any option at one micro-batch size, by first block, then by group."""

    num_blocks: int
    option: Ints
    """Index of the option."""
    group: Ints
    """(kind, width), by index."""
    start: Ints
    stop: Ints
    by_cut: Ints
    """The entries in order of (first block, block after the last)."""
    cut_rows: Ints
    """Where in that order each cut begins."""
    cuts: Ints
    """Of each of those the cut, as an index into a flat square of blocks."""
    work_s: Floats
    """Forward + backward."""
    share: Floats
    """Part of the model, by what its blocks take at their fastest."""
    backward_s: Floats
    part_s: Floats
    """The shorter of the two."""
    hops_s: Floats
    """Transfers both ways between a stage of one group and the next of another, at best."""
    member: tuple[int, ...]
    """By group an option of it."""
    room: Ints
    """Most micro-batches in flight; a large number where all of any pipeline have room."""
    update_s: Floats
    late_s: Floats
    """Longest backward time of what can lie before the stage, transfers included."""
    shortest_s: Floats
    """The shortest chain through all blocks that has this stage in it."""
    rest_s: Floats
    """The shortest chain from the entry on, and forward through what lies before it."""
    fastest_s: float
    """The shortest chain through all blocks."""
    least_pace_s: float
    """No template's pace is less."""


class Limits(NamedTuple):
    """What the stages of one exploration may take, by entry of `StageTables`."""

    update_s: Floats
    sync_s: Floats
    """All-reduce of its gradients, less its own backward."""
    price: Floats


class CutSet(NamedTuple):
    """Where stages may begin."""

    blocks: frozenset[int]
    """What the stages after the first may begin at."""
    is_exact: bool
    """Whether a stage has to begin at each of them."""

    def has(self, cuts: frozenset[int]) -> bool:
        """Whether a template may be cut there."""
        return cuts == self.blocks if self.is_exact else cuts <= self.blocks

    def stages(self, tables: StageTables) -> NDArray[np.bool_]:
        """By entry of the tables: whether it is a stage of such a template."""
        edges = np.array([0, *sorted(self.blocks), tables.num_blocks])
        found = np.isin(tables.start, edges) & np.isin(tables.stop, edges)
        if self.is_exact:
            found &= np.searchsorted(edges, tables.start) + 1 == np.searchsorted(edges, tables.stop)
        return found


def stage_tables(problem: Problem, b: int) -> StageTables:
    """All stages of a problem at a micro-batch size that memory has room for.

    Raises:
        SearchOverError: the time of the search was over.
    """
    problem.check_over()
    n = problem.num_blocks
    starts, stops = np.triu_indices(n + 1, k=1)
    costs = [problem.costs(option, b) for option in problem.options]
    forward = np.array([c.forward_s[starts, stops] for c in costs])
    backward = np.array([c.backward_s[starts, stops] for c in costs])
    room = np.array([c.in_flight[starts, stops] for c in costs])
    room = np.where(room >= problem.max_stages, ALWAYS, room)
    for o, option in enumerate(problem.options):
        plain = problem.plain(option)
        if plain is not None:
            room[o] = np.where(room[plain] >= room[o], 0, room[o])
    hops = problem.hops(b)
    work = forward + backward
    chain = work + np.where(stops == n, 0.0, hops.min(axis=1)[:, None])
    slowest = _longest_chains(starts, stops, backward, hops, n)
    before, after = _fastest_chains(starts, stops, chain.min(axis=0), n)
    single = work.min(axis=0)[stops == starts + 1]
    parts = np.cumsum([0.0, *np.where(np.isfinite(single), single, 0.0)])
    parts /= parts[-1] or 1.0
    onward, _ = _fastest_chains(starts, stops, forward.min(axis=0), n)
    pair, option_index = np.nonzero((room > 0).T & np.isfinite(chain).T)
    groups = list(dict.fromkeys((o.kind, o.tensor_parallel) for o in problem.options))
    group_of = np.array([groups.index((o.kind, o.tensor_parallel)) for o in problem.options])
    member = [int(np.flatnonzero(group_of == g)[0]) for g in range(len(groups))]
    order = np.lexsort((group_of[option_index], starts[pair]))
    pair, option_index = pair[order], option_index[order]
    at = (option_index, pair)
    cuts = starts[pair] * (n + 1) + stops[pair]
    by_cut = np.argsort(cuts, kind="stable")
    cut_rows = np.flatnonzero(np.diff(cuts[by_cut], prepend=-1))
    return StageTables(
        n,
        option_index,
        group_of[option_index],
        starts[pair],
        stops[pair],
        by_cut,
        cut_rows,
        cuts[by_cut][cut_rows],
        work[at],
        (parts[stops] - parts[starts])[pair],
        backward[at],
        np.maximum(np.minimum(forward, backward)[at], 1e-12 * work[at]),
        hops[np.ix_(member, member)],
        tuple(member),
        room[at],
        np.array([c.optimizer_s[starts, stops] for c in costs])[at],
        slowest[starts[pair]],
        before[starts[pair]] + chain[at] + after[stops[pair]],
        onward[starts[pair]] + chain[at] + after[stops[pair]],
        float(after[0]),
        _least_pace_s(problem, b),
    )


class Formulas:
    """What templates do within a time by formula, many of them at once."""

    def __init__(self, problem: Problem, tables: Mapping[int, StageTables], sync_s: Floats) -> None:
        self._problem = problem
        self._tables = tables
        self._sync_s = sync_s
        self._index: dict[int, dict[tuple[int, int, int], int]] = {}
        self._rows: list[Floats] = []
        """By template: for each stage what is not spare, work, part, place, room [s, ., .]."""
        self._most: list[int] = []
        self._joined: tuple[Floats, Ints] | None = None

    def add(self, template: Template) -> bool:
        """Append a template; False: one of its stages does not exist or has no use."""
        b = template.micro_batch_size
        tables = self._tables[b]
        if b not in self._index:
            keys = zip(
                tables.option.tolist(), tables.start.tolist(), tables.stop.tolist(), strict=True
            )
            self._index[b] = {key: at for at, key in enumerate(keys)}
        options = self._problem.options
        found = [
            self._index[b].get((options.index(s.option), s.start, s.stop)) for s in template.stages
        ]
        entries = np.array([at for at in found if at is not None], dtype=np.int64)
        if len(entries) < len(found):
            return False
        hops = tables.hops_s[tables.group[entries][:-1], tables.group[entries][1:]]
        chain_s = float(tables.work_s[entries].sum() + hops.sum())
        limits = limits_of(tables, np.zeros(len(options)), self._sync_s)
        after = after_s(tables, limits, chain_s)[entries]
        places = np.arange(len(entries), 0, -1)
        self._rows.append(
            np.stack(
                (
                    chain_s + after,
                    tables.work_s[entries],
                    tables.part_s[entries],
                    places,
                    tables.room[entries],
                )
            )
        )
        self._most.append(self._problem.global_batch_size // b)
        self._joined = None
        return True

    def micro_batches(self, time_s: float) -> Ints:
        """By template, in the order in which they were added: most that it does within a time."""
        if not self._rows:
            return np.zeros(0, dtype=np.int64)
        if self._joined is None:
            lengths = [row.shape[1] for row in self._rows]
            firsts = np.cumsum([0, *lengths[:-1]])
            self._joined = np.concatenate(self._rows, axis=1), firsts
        (taken, work, part, places, room), firsts = self._joined
        found = _formula(work, part, room, places, time_s - taken)
        least: Floats = np.asarray(np.minimum.reduceat(found, firsts))
        capped = np.minimum(least, np.array(self._most))
        return np.asarray(capped, dtype=np.int64)


def micro_batches_of(tables: StageTables, entries: Ints, places: Ints, spare_s: Floats) -> Floats:
    """Most micro-batches of stages, by what is left of the time after chain, sync and update."""
    return _formula(
        tables.work_s[entries], tables.part_s[entries], tables.room[entries], places, spare_s
    )


def _formula(work_s: Floats, part_s: Floats, room: Ints, places: Ints, spare_s: Floats) -> Floats:
    """``(m - 1) w - (min(m, q) - 1) g <= spare``; and memory has room for min(m, q); 0: none."""
    most = 1 + (spare_s + (places - 1) * part_s) / work_s
    # With more places than micro-batches the limit on the longer part holds instead.
    most = np.where(most >= places, most, np.minimum(1 + spare_s / (work_s - part_s), places))
    most = np.minimum(most, np.where(room >= places, ALWAYS, room))
    return np.where(spare_s >= 0, most * (1 + ROUNDING), 0.0)


def limits_of(tables: StageTables, option_prices: Floats, sync_s: Floats) -> Limits:
    """What stages may take, from prices by option and sync by [start, stop]."""
    sync = sync_s[tables.start, tables.stop] - tables.backward_s
    return Limits(tables.update_s, sync, option_prices[tables.option])


def after_s(tables: StageTables, limits: Limits, longest_s: float) -> Floats:
    """What comes after an entry's last backward at least, where no chain is longer [s].

    Its update, and what of its sync neither its own backward nor those before it can hide.
    """
    before = np.minimum(tables.late_s, longest_s - tables.rest_s)
    return limits.update_s + np.maximum(limits.sync_s - np.maximum(before, 0.0), 0.0)


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


def _least_pace_s(problem: Problem, b: int) -> float:
    """The largest block's least time, which bounds the pace of every template [s].

    A stage's forward and its backward are no longer than the pace, wherever it stands.
    """
    return max(
        min(max(problem.block_times_s(option, block, b)) for option in problem.options)
        for block in range(problem.num_blocks)
    )


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
