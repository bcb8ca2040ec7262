"""Shares of the batch for pipelines that are fixed: the split that ends soonest by given times.

The time of a pipeline rises with its micro-batches, so within a time T each can do m_i(T) of them;
T is enough when they sum to the batch and the surplus can be taken back in whole micro-batches.
The split is as exact as the times: those of `timeline.Clock` are estimates for long runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eth_cli.search.cost import CostModel
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.timeline import Clock, PipelineTimes, most_within


class Worker(NamedTuple):
    """One pipeline, as far as shares go."""

    micro_batch_size: int
    max_micro_batches: int
    """Most that its memory allows."""
    time_s: Callable[[int], float]
    """Time of so many micro-batches, not falling [s]. The same object for like pipelines makes
    them equal, so that each sort of pipeline is looked at once."""


def levelled(
    model: CostModel, pipelines: Sequence[PlacedPipeline], total: int
) -> tuple[PlacedPipeline, ...] | None:
    """The same pipelines with the shares of a batch that end soonest, sync aside; None: no
    split. They may need more memory than before."""
    clocks: dict[PipelineTimes, Clock] = {}
    workers = []
    for p in pipelines:
        times = model.times(p)
        clock = clocks.setdefault(times, Clock(times))
        workers.append(Worker(p.micro_batch_size, total // p.micro_batch_size, clock))
    split = level(workers, total)
    if split is None:
        return None
    return tuple(p._replace(micro_batches=m) for p, m in zip(pipelines, split, strict=True))


def level(workers: Sequence[Worker], global_batch_size: int) -> list[int] | None:
    """Micro-batches of each worker, at least one, with the least largest time; None: no split."""
    if sum(w.micro_batch_size * w.max_micro_batches for w in workers) < global_batch_size:
        return None
    low, high = 0.0, max(w.time_s(w.max_micro_batches) for w in workers)
    best = _split(workers, high, global_batch_size)
    if best is None:
        return None
    # Bisection down to one float step or to a time at which nothing changes.
    for _ in range(60):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        split = _split(workers, middle, global_batch_size)
        if split is None:
            low = middle
        else:
            best = split
            high = max(w.time_s(m) for w, m in zip(workers, split, strict=True))
    return best


def _split(workers: Sequence[Worker], time_s: float, total: int) -> list[int] | None:
    by_worker = {
        worker: most_within(worker.time_s, time_s, worker.max_micro_batches)
        for worker in dict.fromkeys(workers)
    }
    most = [by_worker[worker] for worker in workers]
    if 0 in most:
        return None
    surplus = sum(w.micro_batch_size * m for w, m in zip(workers, most, strict=True)) - total
    if surplus < 0:
        return None
    # Take the surplus back where it shortens the longest: large micro-batches first.
    order = sorted(range(len(workers)), key=lambda i: (-workers[i].micro_batch_size, -most[i]))
    given = _take_back([(workers[i].micro_batch_size, most[i] - 1) for i in order], surplus)
    if given is None:
        return None
    for i, number in zip(order, given, strict=True):
        most[i] -= number
    return most


def _take_back(items: Sequence[tuple[int, int]], surplus: int) -> list[int] | None:
    """How many of each (size, most) sum to the surplus; None: no way. Exact."""
    sizes = sorted({size for size, _ in items})
    if len(sizes) == 1:
        return _greedy(items, surplus)
    quick = _greedy(items, surplus)
    if quick is not None:
        return quick
    # Bit s of the last: whether the size classes so far can sum to s, so quick for long batches.
    room = {size: sum(most for s, most in items if s == size) for size in sizes}
    mask = (1 << (surplus + 1)) - 1
    reach = [1]
    for size in sizes:
        reach.append(_with_up_to(reach[-1], size, min(room[size], surplus // size)) & mask)
    if not reach[-1] >> surplus & 1:
        return None
    left = surplus
    take: dict[int, int] = {}
    for i in range(len(sizes) - 1, -1, -1):
        size = sizes[i]
        # The smaller sizes reach no more than this.
        least = max(0, -(-(left - (reach[i].bit_length() - 1)) // size))
        take[size] = next(
            n for n in range(least, room[size] + 1) if reach[i] >> left - size * n & 1
        )
        left -= size * take[size]
    return [number for number, _ in _spread(items, take)]


def _with_up_to(reach: int, size: int, most: int) -> int:
    """The sums of ``reach`` with 0 to ``most`` times a size added."""
    done, step = 0, 1
    while done < most:
        step = min(step, most - done)
        reach |= reach << size * step
        done += step
        step *= 2
    return reach


def _greedy(items: Sequence[tuple[int, int]], surplus: int) -> list[int] | None:
    given = []
    for size, most in items:
        number = min(most, surplus // size)
        given.append(number)
        surplus -= number * size
    return given if surplus == 0 else None


def _spread(items: Sequence[tuple[int, int]], take: dict[int, int]) -> Iterator[tuple[int, int]]:
    for size, most in items:
        number = min(most, take[size])
        take[size] -= number
        yield number, size


def splits(sizes: Sequence[int], most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every split of a total: 1 <= m_i <= most_i with sum of sizes_i m_i = total."""
    if not sizes:
        if total == 0:
            yield ()
        return
    rest_most = sum(s * m for s, m in zip(sizes[1:], most[1:], strict=True))
    rest_least = sum(sizes[1:])
    size = sizes[0]
    low = max(1, -((rest_most - total) // size))
    high = min(most[0], (total - rest_least) // size)
    for number in range(low, high + 1):
        for others in splits(sizes[1:], most[1:], total - size * number):
            yield number, *others
