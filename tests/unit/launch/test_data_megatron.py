"""Megatron's token files, written here byte by byte, and every way in which they can be bad."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.launch.data_files import ids_of, open_source, write_megatron

from eth_cli.errors import ConfigError
from eth_cli.launch.data import megatron
from eth_cli.launch.dataset import IGNORED_LABEL

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]], [], [[10, 11]]]
"""Of one, two and no sequences."""


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<u2"])
def test_tokens_are_read_where_they_are(tmp_path: Path, dtype: str) -> None:
    prefix = write_megatron(tmp_path / "data.v1", DOCUMENTS, dtype=dtype)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert ids_of(open_source(path, seq_len=4, vocab_size=12)) == list(range(1, 11))
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("tokens.bin"))


def test_borders_are_those_of_documents_not_of_sequences(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    source = open_source(prefix, seq_len=10, vocab_size=12, ignore_borders=True)
    labels = source.sample(0)[1].tolist()
    assert labels == [2, 3, 4, IGNORED_LABEL, 6, 7, 8, 9, IGNORED_LABEL, 11]


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), min_size=1, max_size=12
    ),
    chunk=st.integers(1, 5),
)
@settings(deadline=None, max_examples=50)
def test_any_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], chunk: int
) -> None:
    flat = [[i for sequence in document for i in sequence] for document in documents]
    tokens = [i for document in flat for i in document]
    if len(tokens) < 2:
        return
    prefix = write_megatron(tmp_path_factory.mktemp("megatron") / "x", documents, dtype="<i4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_CHUNK", chunk)
        source = open_source(prefix, seq_len=len(tokens) - 1, vocab_size=100, ignore_borders=True)
    given_tokens, labels = source.sample(0)
    assert given_tokens.tolist() == tokens[:-1]
    starts = set(np.cumsum([len(document) for document in flat]).tolist())
    expected = [IGNORED_LABEL if i + 1 in starts else tokens[i + 1] for i in range(len(tokens) - 1)]
    assert labels.tolist() == expected


def with_index(change: Callable[[bytearray], object]) -> Callable[[Path], object]:
    """Spoil the index of a prefix."""

    def spoil(prefix: Path) -> None:
        path = Path(f"{prefix}.idx")
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)

    return spoil


def put(offset: int, form: str, value: int) -> Callable[[Path], object]:
    """Write a value into the index of a prefix."""
    return with_index(lambda content: struct.pack_into(form, content, offset, value))


def cut(suffix: str, size: int) -> Callable[[Path], object]:
    """Cut a file of a prefix short."""

    def spoil(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:size])

    return spoil


LENGTHS = 9 + 8 + 1 + 16
OFFSETS = LENGTHS + 4 * 4
BORDERS = OFFSETS + 4 * 8


@pytest.mark.parametrize(
    ("spoil", "file", "field", "message"),
    [
        (cut(".idx", 0), ".idx", "", "is cut short at byte 0, in its header of 34 bytes"),
        (cut(".idx", 20), ".idx", "", "is cut short at byte 20, in its header of 34 bytes"),
        (
            cut(".idx", BORDERS + 3),
            ".idx",
            "",
            f"is cut short at byte {BORDERS + 3}: 4 sequences and 5 document borders take "
            f"{BORDERS + 40} bytes",
        ),
        (put(0, "<B", 7), ".idx", "", "is not a Megatron index (byte 0"),
        (
            with_index(lambda c: c.__setitem__(slice(0, 8), b"TNTIDX\x00\x00")),
            ".idx",
            "",
            "is an index of the older TNTIDX format",
        ),
        (put(9, "<Q", 2), ".idx", "byte 9", "is of version 2, but only version 1 is known"),
        (put(17, "<B", 7), ".idx", "byte 17", "is of float32 numbers, not of token ids"),
        (put(17, "<B", 6), ".idx", "byte 17", "is of float64 numbers"),
        (put(17, "<B", 0), ".idx", "byte 17", "says that ids are of type 0, which is unknown"),
        (
            put(17, "<B", 4),
            ".idx",
            "sequence 1",
            "begins at byte 6 instead of 12: sequences must follow each other",
        ),
        (put(18, "<Q", 2**60), ".idx", "", "is cut short at byte"),
        (put(LENGTHS + 4, "<i", -1), ".idx", "sequence 1", "has -1 tokens"),
        (put(OFFSETS + 16, "<q", 9), ".idx", "sequence 2", "begins at byte 9 instead of 8"),
        (put(BORDERS + 8, "<q", 9), ".idx", "document border 1", "is 9, but borders ascend to 4"),
        (put(BORDERS + 16, "<q", 1), ".idx", "document border 2", "is 1, but borders ascend to 4"),
        (put(BORDERS, "<q", -1), ".idx", "document border 0", "is -1, but"),
        (
            cut(".bin", 21),
            ".bin",
            "",
            "is cut short at byte 21: its index tells of 11 tokens of 2 bytes, 22 bytes",
        ),
        (lambda p: Path(f"{p}.bin").unlink(), ".bin", "", "no such file"),
        (lambda p: Path(f"{p}.idx").unlink(), ".idx", "", "no such file; Megatron data are"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, spoil: Callable[[Path], object], file: str, field: str, message: str
) -> None:
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    spoil(prefix)
    with pytest.raises(ConfigError) as error:
        open_source(prefix, vocab_size=100)
    (fault,) = error.value.faults
    assert (fault.file, fault.field) == (f"{prefix}{file}", field)
    assert message in fault.message


def test_tokens_after_the_last_one_of_the_index_are_told(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    with open(f"{prefix}.bin", "ab") as tokens:
        tokens.write(b"xx")
    with pytest.raises(ConfigError, match="goes on to byte 24: its index tells of 11 tokens"):
        open_source(prefix, vocab_size=100)


@pytest.mark.parametrize("chunk", [3, 2**22])
def test_ids_that_the_model_lacks_are_told_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(megatron, "_CHUNK", chunk)
    prefix = write_megatron(tmp_path / "data", [[[1, 2, 3], [4, 300, 5, 299]]], dtype="<i4")
    assert open_source(prefix, vocab_size=301).num_samples == 2
    for size in (300, 299, 10):  # found again without reading the tokens again
        with pytest.raises(ConfigError) as error:
            open_source(prefix, vocab_size=size)
        message = (
            f"holds the token id 300 (data.bin, byte 16), but the model's vocab_size is {size}"
        )
        assert message in str(error.value)
    write_megatron(tmp_path / "data", [[[1, 2, 3], [4, -1, 5, -7]]], dtype="<i4")
    with pytest.raises(ConfigError, match=r"holds the token id -7 \(data\.bin, byte 24\)"):
        open_source(prefix, vocab_size=100)
