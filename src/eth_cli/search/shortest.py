"""The cheapest pipeline as a shortest path: stages over all blocks, from the last to the first.

A dynamic programme over (place from the end, first block, group of devices). The place tells what
memory and the limits on a stage permit, the group what the transfer to the next stage takes. A
quick programme without places and transfers comes first: it bounds every path, so most stages, and
often all, are out before the exact one starts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eth_cli.search.stages import StageTables
from eth_cli.search.templates import Floats, Ints


class Allowed(NamedTuple):
    """Stages that a path may have."""

    entries: Ints
    """Into the stage tables, ascending."""
    first: Ints
    """First place from the end that each may have."""
    last: Ints


class Path(NamedTuple):
    """Stages over all blocks."""

    cost: float
    entries: tuple[int, ...]
    """Into the stage tables, from the first stage to the last."""
    chain_s: float
    """One micro-batch there and back, transfers included [s]."""


def cheapest_path(
    tables: StageTables,
    allowed: Allowed,
    prices: Floats,
    *,
    price_of_time: float,
    enough: float,
    max_stages: int,
) -> Path | None:
    """The path of least cost, its price and the price of its chain; None: none below ``enough``.

    Args:
        prices: of every stage of the tables.
        price_of_time: of a second of the chain.
        enough: a cost that is of no interest any more.
    """
    index = allowed.entries
    cost = prices[index] + price_of_time * tables.work_s[index]
    kept, before = _on_cheap_paths(tables, index, cost, enough)
    if not len(kept):
        return None
    index, cost = index[kept], cost[kept]
    first, last = allowed.first[kept], allowed.last[kept]
    stop = tables.stop[index]
    used, group = np.unique(tables.group[index], return_inverse=True)
    hops_s = tables.hops_s[np.ix_(used, used)]
    # Groups that are not connected stay so where time costs nothing: nothing times infinity is nan.
    hops = np.full_like(hops_s, np.inf)
    np.multiply(price_of_time, hops_s, out=hops, where=np.isfinite(hops_s))
    num_groups, size = len(used), len(before)
    key = tables.start[index] * num_groups + group
    # Blocks and groups in one number; entries are in the order of their first block and group.
    rows = np.flatnonzero(np.diff(key, prepend=-1))
    row_keys = key[rows]
    into = stop * num_groups + group
    still_before = np.repeat(before, num_groups)[row_keys]
    changes = _changes(first, last, max_stages)
    cost_here = np.where(first <= 1, cost, np.inf)
    # rest[block, group]: the cheapest from a block on, the hop from a group to it included.
    rest = np.full(size * num_groups, np.inf)
    rest[-num_groups:] = 0.0
    best, best_place, best_key = enough, 0, 0
    rests, values = [rest], []
    for place in range(1, max_stages + 1):
        if place in changes:
            cost_here = np.where((first <= place) & (place <= last), cost, np.inf)
        value = np.full(size * num_groups, np.inf)
        value[row_keys] = found = np.minimum.reduceat(cost_here + rest[into], rows)
        at = int(value[:num_groups].argmin())
        if value[at] < best:
            best, best_place, best_key = float(value[at]), place, at
        values.append(value)
        if (found + still_before).min() >= best:
            break
        square = value.reshape(size, num_groups)
        if num_groups == 1:
            rest = value + hops[0, 0]
        else:
            rest = (square[:, None, :] + hops).min(axis=2).ravel()
        rests.append(rest)
    if best_place == 0:
        return None
    chosen: list[int] = []
    at, chain_s = best_key, 0.0
    for place in range(best_place, 0, -1):
        low, high = np.searchsorted(key, (at, at + 1))
        totals = np.where(
            (first[low:high] <= place) & (place <= last[low:high]),
            cost[low:high] + rests[place - 1][into[low:high]],
            np.inf,
        )
        here = int(low) + int(totals.argmin())
        chosen.append(int(index[here]))
        chain_s += float(tables.work_s[index[here]])
        if place > 1:
            block, mine = int(stop[here]), int(group[here])
            following = values[place - 2][block * num_groups : (block + 1) * num_groups]
            other = int((following + hops[mine]).argmin())
            chain_s += float(hops_s[mine, other])
            at = block * num_groups + other
    return Path(best, tuple(chosen), chain_s)


def _changes(first: Ints, last: Ints, max_stages: int) -> set[int]:
    """Places at which other stages are allowed than at the place before."""
    places = np.concatenate((first, last + 1))
    return set(np.unique(places[(places > 1) & (places <= max_stages)]).tolist())


def _on_cheap_paths(
    tables: StageTables, index: Ints, cost: Floats, enough: float
) -> tuple[Ints, Floats]:
    """Which stages are on a path cheaper than ``enough``, places and hops aside.

    And by block, the least cost of all before it.
    """
    size = tables.num_blocks + 1
    nothing = np.zeros(0, dtype=np.int64)
    before, after = np.full((2, size), np.inf)
    before[0] = after[-1] = 0.0
    if not len(index):
        return nothing, before
    everywhere = np.full(len(tables.start), np.inf)
    everywhere[index] = cost
    square = np.full((size, size), np.inf)
    least = np.minimum.reduceat(everywhere[tables.by_cut], tables.cut_rows)
    square.ravel()[tables.cuts] = least
    for block in range(size - 2, -1, -1):
        after[block] = (square[block] + after).min()
    if not after[0] < enough:
        return nothing, before
    columns = np.ascontiguousarray(square.T)
    for block in range(1, size):
        before[block] = (columns[block] + before).min()
    through = before[tables.start[index]] + cost + after[tables.stop[index]]
    (kept,) = np.nonzero(through < enough)
    return kept, before
