"""Samples: windows over tokens, borders of documents, parts and mixtures of sources."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.launch.data_files import ids_of

from eth_cli.launch import dataset
from eth_cli.launch.data.files import FileArray
from eth_cli.launch.dataset import (
    IGNORED_LABEL,
    Borders,
    Mixture,
    SampleRange,
    WindowedTokens,
)


def windows(
    tokens: range, *, seq_len: int = 4, ends: list[int] | None = None, digest: str = "d"
) -> WindowedTokens:
    return WindowedTokens(
        np.array(tokens, dtype=np.uint8),
        seq_len=seq_len,
        digest=digest,
        borders=None if ends is None else Borders(np.array(ends)),
    )


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(5, 1), (6, 1), (7, 2), (10, 2), (13, 3)])
def test_windows_hold_every_token_once(num_tokens: int, num_samples: int) -> None:
    source = windows(range(num_tokens))
    assert source.num_samples == num_samples
    # A single token that is left over has no label, so no window is made for it.
    assert ids_of(source) == list(range(num_tokens - (num_tokens % 5 == 1)))


def test_sample_outside_the_data_is_an_error() -> None:
    mixture = Mixture([windows(range(10)), windows(range(5))])
    part = SampleRange(windows(range(20)), 1, 3)
    for source, index, size in ((windows(range(10)), 2, 2), (mixture, 3, 3), (part, 2, 2)):
        with pytest.raises(IndexError, match=f"sample {index} of {size}"):
            source.sample(index)
        with pytest.raises(IndexError, match=f"sample -1 of {size}"):
            source.num_valid(-1)


def test_no_label_stands_across_a_border() -> None:
    # Documents 0-2, 3-4, 5-9 and 10-12; windows of 5 tokens begin at 0, 5 and 10.
    source = windows(range(13), ends=[3, 5, 10, 13])
    tokens, labels = source.sample(0)
    assert tokens.tolist() == [0, 1, 2, 3]
    assert labels.tolist() == [1, 2, IGNORED_LABEL, 4]
    # That a document begins with the window, or after it, says nothing about its labels.
    assert source.sample(1)[1].tolist() == [6, 7, 8, 9]
    assert source.sample(2)[1].tolist() == [11, 12, IGNORED_LABEL, IGNORED_LABEL]
    assert [source.num_valid(i) for i in range(3)] == [3, 4, 2]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    seq_len=st.integers(1, 7),
    step=st.sampled_from([1, 2, 5, 1024]),
)
def test_borders_are_those_between_documents(lengths: list[int], seq_len: int, step: int) -> None:
    ends = np.cumsum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "_BORDERS_STEP", step)
        borders = Borders(ends)
        source = WindowedTokens(np.arange(ends[-1]), seq_len=seq_len, digest="", borders=borders)
        document_of = np.repeat(np.arange(len(lengths)), lengths)
        for index in range(source.num_samples):
            first = index * (seq_len + 1)
            labels = [
                t + 1
                if t + 1 < ends[-1] and document_of[t] == document_of[t + 1]
                else IGNORED_LABEL
                for t in range(first, first + seq_len)
            ]
            assert source.sample(index)[1].tolist() == labels
            assert source.num_valid(index) == seq_len - labels.count(IGNORED_LABEL)


def test_a_part_of_a_source_is_its_samples() -> None:
    whole = windows(range(20), digest="sha256:ab")
    part = SampleRange(whole, 1, 3)
    assert ids_of(part) == list(range(5, 15))
    assert part.digest == "sha256:ab[1:3]"


def test_a_mixture_numbers_samples_through() -> None:
    one, two = windows(range(10), digest="x"), windows(range(100, 113), digest="y")
    mixture = Mixture([one, two])
    assert mixture.num_samples == 5
    assert ids_of(mixture) == [*range(10), *range(100, 113)]
    digests = {mixture.digest, Mixture([two, one]).digest, Mixture([one, two], [1, 2]).digest}
    assert len(digests) == 3
    assert mixture.digest == "x and y"


def test_an_array_in_a_file_is_read_slice_by_slice(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(b"xyz" + np.arange(1000, dtype="<u4").tobytes())
    array = FileArray(path, "<u4", length=1000, offset=3)
    for copy in (array, pickle.loads(pickle.dumps(array))):  # our own
        assert len(copy) == 1000
        assert copy[998:2000].tolist() == [998, 999]
        assert copy[7:7].tolist() == copy[9:3].tolist() == []
        assert copy[-2:].tolist() == [998, 999]
        with pytest.raises(IndexError):
            copy[::2]
    path.write_bytes(b"xyz")
    with pytest.raises(OSError, match="was cut short while it was in use"):
        array[0:2]
