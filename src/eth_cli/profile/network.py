"""Latency and bandwidth between two ranks, as a table of [bytes, seconds]; runs in a worker.

The same sends and receives as between two stages of a pipeline. One transfer is half a round trip,
because two processes have no common clock that is exact enough on two machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from eth_cli.profile.measurement import MESSAGE_BYTES

NUM_WARM_UPS = 2
MIN_REPEATS, MAX_REPEATS = 3, 30
MAX_ENTRY_S = 0.25
"""Time to spend on one size [s]; MIN_REPEATS are done in any case."""


def measure_link(
    *,
    peer: int,
    leads: bool,
    device: torch.device,
    on_done: Callable[[int], None] | None = None,
    sizes: Sequence[int] = MESSAGE_BYTES,
) -> tuple[tuple[float, float], ...] | None:
    """Time of transfers to and from another rank of the default group.

    Both ranks call this, one of them with ``leads``. Waits are bounded by the group's timeout.

    Returns:
        For the rank that leads, rows (bytes, seconds); None for the other.
    """
    rows = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        warm_s = [_round_trip(buffer, peer, leads=leads) for _ in range(1 + NUM_WARM_UPS)]
        # Both ranks have to repeat equally often, so the leader says how often.
        repeats = torch.tensor(
            [min(MAX_REPEATS, max(MIN_REPEATS, int(MAX_ENTRY_S / max(warm_s[-1], 1e-9))))],
            device=device,
        )
        if leads:
            dist.send(repeats, peer)
        else:
            dist.recv(repeats, peer)
        times_s = [_round_trip(buffer, peer, leads=leads) for _ in range(int(repeats))]
        rows.append((float(size), statistics.median(times_s) / 2))
        if on_done is not None:
            on_done(size)
    return monotone(rows) if leads else None


def _round_trip(buffer: torch.Tensor, peer: int, *, leads: bool) -> float:
    """There and back again [s]."""
    start = time.perf_counter()
    for is_send in (leads, not leads):
        work = dist.isend(buffer, peer) if is_send else dist.irecv(buffer, peer)
        assert work is not None  # None only for ranks outside the group
        work.wait()
    if buffer.is_cuda:
        # On a GPU waiting only orders the streams.
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - start


def monotone(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Rows by rising size, without times that fall as the size rises.

    A short message never takes longer than a long one, and disturbances only ever add time: so each
    time is lowered to the least time that any longer message took.
    """
    result: list[tuple[float, float]] = []
    least = float("inf")
    for size, seconds in sorted(rows, reverse=True):
        least = min(least, seconds)
        result.append((size, least))
    return tuple(reversed(result))
