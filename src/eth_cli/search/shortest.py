"""The cheapest pipeline as a shortest path: stages over all blocks, from the last to the first.

A dynamic programme over (place from the end, first block, group of devices). The place tells what
memory and the limits on a stage permit, the group what the transfer to the next stage takes. A
quick programme without places and transfers comes first: it bounds every path, so most stages, and
often all, are out before the exact one starts.
"""

from __future__ import annotations

from operator import add
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


class Slowness(NamedTuple):
    """What a stage costs for being slower than a pace, by its part of the model.

    A stage of work w at place q, of which g the shorter of forward and backward, makes the pace p
    of a template with m micro-batches at least ``w - g (q - 1) / (m - 1)``. So with parts that sum
    to one, ``1/pace - 1/p`` is at least the sum of ``part (1/pace - 1/that)`` over the stages.
    """

    price: float
    """Of the whole model at an infinitely slow pace."""
    pace_s: float
    micro_batches: int
    """Least m; at least 2."""


def cheapest_path(
    tables: StageTables,
    allowed: Allowed,
    prices: Floats,
    *,
    price_of_time: float,
    slowness: Slowness | None = None,
    enough: float,
    max_stages: int,
) -> Path | None:
    """The path of least cost, its price and the price of its chain; None: none below ``enough``.

    Args:
        prices: of every stage of the tables.
        price_of_time: of a second of the chain.
        slowness: what stages slower than a pace cost more; None: nothing.
        enough: a cost that is of no interest any more.
    """
    index = allowed.entries
    cost = prices[index] + price_of_time * tables.work_s[index]
    least = cost
    if slowness is not None:
        least = cost + _of_slowness(tables, index, slowness, max_stages)
    kept, before = _on_cheap_paths(tables, index, least, enough)
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
    rests, values, costs = [rest], [], list[Floats]()
    for place in range(1, max_stages + 1):
        if slowness is not None or place in changes:
            cost_here = np.where((first <= place) & (place <= last), cost, np.inf)
            if slowness is not None:
                cost_here += _of_slowness(tables, index, slowness, place)
            costs.append(cost_here)
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
            # By next group first, so that the minimum is over whole rows.
            ways = square.T[:, :, None] + hops.T[:, None, :]
            rest = ways.min(axis=0).ravel()
        rests.append(rest)
    if best_place == 0:
        return None
    chosen: list[int] = []
    at, chain_s = best_key, 0.0
    for place in range(best_place, 0, -1):
        low, high = np.searchsorted(key, (at, at + 1))
        here_cost = costs[place - 1] if slowness is not None else cost
        totals = np.where(
            (first[low:high] <= place) & (place <= last[low:high]),
            here_cost[low:high] + rests[place - 1][into[low:high]],
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


def _of_slowness(tables: StageTables, index: Ints, slowness: Slowness, place: int) -> Floats:
    """What each stage costs for being slow at a place from the end."""
    ahead = (place - 1) / (slowness.micro_batches - 1)
    # With more places than micro-batches at least the longer of forward and backward is left.
    own_s = tables.work_s[index] - min(ahead, 1.0) * tables.part_s[index]
    slow = np.maximum(1 - slowness.pace_s / own_s, 0.0)
    return np.asarray(slowness.price * tables.share[index] * slow)


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
    if not len(index):
        return nothing, np.full(size, np.inf)
    everywhere = np.full(len(tables.start), np.inf)
    everywhere[index] = cost
    square = np.full((size, size), np.inf)
    square.ravel()[tables.cuts] = np.minimum.reduceat(everywhere[tables.by_cut], tables.cut_rows)
    # Plain lists: a programme of so few steps is mostly the calls.
    after = [0.0]
    for block in range(size - 2, -1, -1):
        after.insert(0, min(map(add, square[block, block + 1 :].tolist(), after)))
    if not after[0] < enough:
        return nothing, np.full(size, np.inf)
    columns = square.T.tolist()
    before = [0.0]
    for block in range(1, size):
        before.append(min(map(add, columns[block], before)))
    least_before = np.array(before)
    through = least_before[tables.start[index]] + cost + np.array(after)[tables.stop[index]]
    (kept,) = np.nonzero(through < enough)
    return kept, least_before
