"""Which blocks' gradients are summed together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eth_cli.buckets import runs


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "num_owners", "expected"),
    [
        ([5, 5, 5], 10, 1, [(0, 2), (2, 3)]),
        ([5, 5, 5], 5, 3, [(0, 3)]),
        ([50, 1, 1], 10, 1, [(0, 1), (1, 3)]),
        ([5, 5], 0, 4, [(0, 1), (1, 2)]),
        ([5, 5], float("inf"), 2, [(0, 2)]),
        ([], 10, 1, []),
    ],
)
def test_whole_blocks_as_many_as_fit(
    sizes: list[int], bucket_bytes: float, num_owners: int, expected: list[tuple[int, int]]
) -> None:
    assert list(runs(sizes, bucket_bytes=bucket_bytes, num_owners=num_owners)) == expected


@given(
    st.lists(st.integers(min_value=0, max_value=20), max_size=12),
    st.integers(min_value=0, max_value=30),
    st.integers(min_value=1, max_value=4),
)
def test_every_block_once_and_no_bucket_could_take_the_next(
    sizes: list[int], bucket_bytes: int, num_owners: int
) -> None:
    found = list(runs(sizes, bucket_bytes=bucket_bytes, num_owners=num_owners))
    assert [i for run in found for i in range(*run)] == list(range(len(sizes)))
    for start, stop in found:
        held = sum(sizes[start:stop])
        assert stop == start + 1 or held <= bucket_bytes * num_owners
        if stop < len(sizes):
            assert held + sizes[stop] > bucket_bytes * num_owners
