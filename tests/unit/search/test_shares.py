"""Splits of the batch over pipelines."""

from __future__ import annotations

import itertools
import random

import pytest

from eth_cli.search.shares import Worker, level, splits


def _worker(size: int, most: int, start: float, each: float) -> Worker:
    return Worker(size, most, lambda m: start + each * m)


def test_level_is_the_best_of_all_splits() -> None:
    rng = random.Random(5)
    num_none = 0
    for _ in range(150):
        workers = [
            _worker(rng.choice([1, 2, 3]), rng.randint(1, 6), rng.uniform(0, 2), rng.uniform(1, 4))
            for _ in range(rng.randint(1, 4))
        ]
        total = rng.randint(1, 20)
        all_splits = [
            split
            for split in itertools.product(*(range(1, w.max_micro_batches + 1) for w in workers))
            if sum(w.micro_batch_size * m for w, m in zip(workers, split, strict=True)) == total
        ]
        assert sorted(
            splits(
                [w.micro_batch_size for w in workers],
                [w.max_micro_batches for w in workers],
                total,
            )
        ) == sorted(all_splits)

        def longest(split: tuple[int, ...] | list[int], of: list[Worker] = workers) -> float:
            return max(w.time_s(m) for w, m in zip(of, split, strict=True))

        found = level(workers, total)
        if found is None:
            num_none += 1
            assert not all_splits
        else:
            assert tuple(found) in all_splits
            assert longest(found) == min(longest(s) for s in all_splits)
    assert 10 < num_none < 140


@pytest.mark.timeout(10)
def test_a_long_batch_of_sizes_that_divide_nothing_takes_no_time_to_speak_of() -> None:
    """Taking back all that is too much, large micro-batches first, leaves a remainder of 1."""
    workers = [_worker(3, 65_536 // 3, 0.0, 3.0)] * 4 + [_worker(2, 65_536 // 2, 0.0, 2.1)] * 4
    for total in (65_535, 65_536, 65_537):
        found = level(workers, total)
        assert found is not None
        assert sum(w.micro_batch_size * m for w, m in zip(workers, found, strict=True)) == total
        longest = max(w.time_s(m) for w, m in zip(workers, found, strict=True))
        # All at one pace, in micro-batches of no size: no split ends sooner.
        least = total / (4 / 1.0 + 4 / 1.05)
        assert least <= longest <= least + 3.0
