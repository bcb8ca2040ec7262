"""Gradient sync in time: which bucket of gradients is all-reduced when, and over whom.

Each stage group syncs one bucket at a time, in the one global order of all ranks: descending block
index, buckets of tied weights last (S5 of the design). A bucket starts when all owners launched it
and finished the bucket before it. Buckets on the air at once share their nodes' NICs: all rates
are set anew whenever a bucket starts or ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eth_cli.buckets import BUCKET_BYTES, GRADIENT_BYTES, runs
from eth_cli.profile.table import ProfiledModel
from eth_cli.search.comm import Ring, all_reduce_s

Owner = tuple[int, int]
"""A stage group: (pipeline index, stage index)."""


class Bucket(NamedTuple):
    """Gradients that are summed in one all-reduce."""

    blocks: tuple[int, int]
    """Blocks ``[start, stop)`` that it is of; of a tied weight, from its first to its last use."""
    is_tied: bool
    num_parameters: int
    owners: tuple[Owner, ...]
    lowest_block: tuple[int, ...]
    """By owner, the block whose backward completes the bucket there."""


def buckets(
    model: ProfiledModel,
    cuts: Sequence[Sequence[tuple[int, int]]],
    *,
    bucket_bytes: float = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """The buckets of a plan in launch order, those with a single owner or no parameters left out.

    Args:
        model: the model.
        cuts: for every pipeline its stages' ``[start, stop)``.
        bucket_bytes: see `eth_cli.buckets.runs`.
    """
    edges = sorted({block for stages in cuts for stage in stages for block in stage}, reverse=True)
    tied = {block for group in model.tied_blocks for block in group}
    found = []
    for stop, start in itertools.pairwise(edges):
        owners = tuple(
            (i, s)
            for i, stages in enumerate(cuts)
            for s, stage in enumerate(stages)
            if stage[0] <= start < stage[1]
        )
        if len(owners) == 1:
            continue
        sizes = [
            model.parameters[block] - (model.tied_parameters if block in tied else 0)
            for block in reversed(range(start, stop))
        ]
        num_bytes = [GRADIENT_BYTES * n for n in sizes]
        for first, last in runs(num_bytes, bucket_bytes=bucket_bytes, num_owners=len(owners)):
            blocks = (stop - last, stop - first)
            lowest = (blocks[0],) * len(owners)
            found.append(Bucket(blocks, False, sum(sizes[first:last]), owners, lowest))
    for group in model.tied_blocks:
        uses = {
            (i, s): [block for block in group if stage[0] <= block < stage[1]]
            for i, stages in enumerate(cuts)
            for s, stage in enumerate(stages)
        }
        uses = {owner: blocks for owner, blocks in uses.items() if blocks}
        found.append(
            Bucket(
                (min(group), max(group) + 1),
                True,
                model.tied_parameters,
                tuple(uses),
                tuple(min(blocks) for blocks in uses.values()),
            )
        )
    return tuple(b for b in found if len(b.owners) > 1 and b.num_parameters > 0)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bucket ready to be timed."""

    owners: tuple[Owner, ...]
    launch_s: float
    """When the last owner has its gradients ready [s]."""
    num_bytes: int
    ring: Ring


def run_sync(transfers: Sequence[Transfer]) -> list[tuple[float, float]]:
    """Start and end of every transfer, given in launch order [s]."""
    spans: list[tuple[float, float]] = [(math.nan, math.nan)] * len(transfers)
    queues: dict[Owner, list[int]] = {}
    for i, transfer in enumerate(transfers):
        for owner in transfer.owners:
            queues.setdefault(owner, []).append(i)
    ahead = [len(t.owners) for t in transfers]  # owners that have not come to this transfer yet
    free_at = [t.launch_s for t in transfers]
    waiting: set[int] = set()

    def advance(owner: Owner, now: float) -> None:
        if queues[owner]:
            head = queues[owner][0]
            ahead[head] -= 1
            free_at[head] = max(free_at[head], now)
            if ahead[head] == 0:
                waiting.add(head)

    for owner in queues:
        advance(owner, 0.0)
    started: dict[int, float] = {}
    duration: dict[int, float] = {}
    end: dict[int, float] = {}
    while waiting or started:
        next_start = min(((free_at[i], i) for i in waiting), default=(math.inf, -1))
        next_end = min(((end[i], i) for i in started), default=(math.inf, -1))
        if next_end[0] <= next_start[0]:
            now, i = next_end
            spans[i] = (started.pop(i), now)
            for owner in transfers[i].owners:
                queues[owner].pop(0)
                advance(owner, now)
        else:
            now, i = next_start
            waiting.discard(i)
            started[i] = now
        _set_rates(transfers, started, duration, end, now)
    return spans


def _set_rates(
    transfers: Sequence[Transfer],
    started: dict[int, float],
    duration: dict[int, float],
    end: dict[int, float],
    now: float,
) -> None:
    """New ends of all transfers on the air, for the NIC sharing from ``now`` on."""
    load: dict[str, int] = {}
    for i in started:
        for node in transfers[i].ring.nodes:
            load[node] = load.get(node, 0) + transfers[i].ring.width
    for i, start in started.items():
        ring = transfers[i].ring
        flows = max((load[node] for node in ring.nodes), default=ring.width)
        time_s = all_reduce_s(ring, transfers[i].num_bytes, flows=flows)
        if i not in end:
            end[i] = start + time_s
        elif duration[i] != time_s:
            remaining = (end[i] - now) / duration[i] if duration[i] > 0 else 0.0
            end[i] = now + remaining * time_s
        duration[i] = time_s
