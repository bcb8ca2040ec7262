"""The order of samples: a permutation an epoch, sources in exact proportion, nothing remembered."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eth_cli.launch.order import Interleaving, Permutation, SampleOrder

sizes = st.integers(1, 200)
keys = st.text(max_size=8)


@given(size=sizes, key=keys)
def test_a_permutation_holds_everything_once(size: int, key: str) -> None:
    assert sorted(Permutation(size, key).at(range(size))) == list(range(size))


@given(size=sizes, key=keys, data=st.data())
def test_any_place_can_be_asked_for_alone(size: int, key: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    permutation = Permutation(size, key)
    assert permutation.at([place]) == [permutation.at(range(size))[place]]


def test_a_permutation_of_many_takes_no_memory() -> None:
    size = 10**15
    places = [*range(100), *range(size - 100, size)]
    values = Permutation(size, "key").at(places)
    assert len(set(values)) == 200
    assert all(0 <= value < size for value in values)
    # Evenly spread: the mean of 200 uniform numbers has a standard deviation of 2 % of their range.
    assert np.mean(values) / size == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("size", [5, 64, 100])
def test_every_sample_comes_at_every_place_equally_often(size: int) -> None:
    num_keys = 2000
    counts = np.zeros((size, size))
    for key in range(num_keys):
        counts[range(size), Permutation(size, f"{key}/0/0").at(range(size))] += 1
    expected = num_keys / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_squared - degrees) < 6 * (2 * degrees) ** 0.5


def test_neighbours_are_not_kept_together() -> None:
    values = np.array(Permutation(1000, "a").at(range(1000)))
    # Of two samples that follow each other, 1 in 500 pairs would be neighbours by chance.
    assert (abs(np.diff(values)) == 1).sum() < 12
    assert abs(np.corrcoef(np.arange(1000), values)[0, 1]) < 0.12


@given(
    weights=st.lists(st.decimals("0.001", "9", places=3).map(float), min_size=1, max_size=6),
    num_positions=st.integers(1, 300),
)
def test_sources_get_their_due_at_any_time(weights: list[float], num_positions: int) -> None:
    interleaving = Interleaving(weights)
    counts = Counter[int]()
    total = sum(Fraction(str(w)) for w in weights)
    for position in range(num_positions):
        source, count = interleaving.at(position)
        assert count == counts[source]  # each source counts its own positions without a gap
        counts[source] += 1
    for source, weight in enumerate(weights):
        due = num_positions * Fraction(str(weight)) / total
        assert abs(counts[source] - due) < source + 1


def test_weights_are_decimal_numbers() -> None:
    interleaving = Interleaving([0.7, 0.2, 0.1])
    assert Counter(interleaving.at(g)[0] for g in range(10**4)) == {0: 7000, 1: 2000, 2: 1000}
    first = [interleaving.at(g)[0] for g in range(10)]
    assert first == [interleaving.at(g + 10**12)[0] for g in range(10)]


@given(
    num_samples=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
@settings(deadline=None, max_examples=40)
def test_without_weights_each_sample_of_all_sources_comes_once_an_epoch(
    num_samples: list[int], batch: int, seed: int
) -> None:
    order = SampleOrder(num_samples=num_samples, global_batch_size=batch, seed=seed)
    total = sum(num_samples)
    steps = -(-3 * total // batch)
    samples = [sample for step in range(steps) for sample in order.batch(step)]
    for epoch in range(3):
        assert sorted(samples[epoch * total : (epoch + 1) * total]) == list(range(total))


@given(
    num_samples=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_each_source_goes_through_its_own_epochs(
    num_samples: list[int], seed: int, data: st.DataObject
) -> None:
    weights = [data.draw(st.integers(1, 5)) for _ in num_samples]
    order = SampleOrder(num_samples=num_samples, global_batch_size=7, seed=seed, weights=weights)
    samples = [sample for step in range(30) for sample in order.batch(step)]
    ends = list(accumulate(num_samples))
    for end, size in zip(ends, num_samples, strict=True):
        own = [sample - (end - size) for sample in samples if end - size <= sample < end]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_the_order_is_a_function_of_seed_and_position(weights: list[int] | None) -> None:
    def samples(batch: int, seed: int) -> list[int]:
        order = SampleOrder(
            num_samples=[7, 30], global_batch_size=batch, seed=seed, weights=weights
        )
        steps = range(60 // batch)
        found = {step: order.batch(step) for step in reversed(steps)}  # asked for in any order
        return [sample for step in steps for sample in found[step]]

    # The batch only cuts it.
    assert samples(1, 4) == samples(4, 4) == samples(60, 4)
    assert samples(4, 5) != samples(4, 4)


def test_epochs_and_sources_have_orders_of_their_own() -> None:
    order = SampleOrder(num_samples=[9, 9], global_batch_size=36, seed=1, weights=[1, 1])
    samples = order.batch(0)
    first = [s for s in samples if s < 9]
    second = [s - 9 for s in samples if s >= 9]
    assert len({tuple(part) for part in (first[:9], first[9:], second[:9], second[9:])}) == 4


def test_batch_larger_than_the_data_goes_through_several_epochs() -> None:
    batch = SampleOrder(num_samples=3, global_batch_size=7, seed=0).batch(0)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 10, 1000, 2**33 + 1])
def test_the_order_stays_what_it_is(size: int) -> None:
    # A run that was saved goes on with the samples that it would have had: the order is a format.
    order = SampleOrder(num_samples=size, global_batch_size=4, seed=3)
    for step in (0, 2):
        expected = []
        for position in range(4 * step, 4 * step + 4):
            epoch, place = divmod(position, size)
            expected.append(feistel(place, size, f"3/0/{epoch}"))
        assert list(order.batch(step)) == expected


def feistel(place: int, size: int, key: str) -> int:
    """The permutation, number by number."""
    half = 1
    while 4**half < size:
        half += 1
    digest = hashlib.shake_256(key.encode()).digest(96)
    while True:
        left, right = place // 2**half, place % 2**half
        for i in range(0, 96, 8):
            x = right ^ int.from_bytes(digest[i : i + 8], "little")
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ ((x ^ x >> 31) % 2**half)
        place = left * 2**half + right
        if place < size:
            return place
