"""Token files of Megatron-LM: ``PREFIX.bin`` with the ids, ``PREFIX.idx`` with where documents are.

The index (little-endian): ``MMIDIDX\\0\\0``, uint64 version 1, uint8 code of the ids' type, uint64
number of sequences, uint64 number of document borders, then int32 lengths of the sequences in
tokens, int64 byte offsets of the sequences, int64 the index of the sequence at which each document
begins, and one past the last. (Source: ``megatron/core/datasets/indexed_dataset.py``.) Tokens are
read where they are; whatever ends a document there stays.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eth_cli.launch.data.cache import Cache, Entry, Writer, refuse
from eth_cli.launch.data.files import FileArray

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CHUNK = 2**22
"""Elements that are looked at at once."""


def megatron_prefix(path: Path) -> Path | None:
    """The prefix that a path means, where it means one: ``x``, ``x.bin`` and ``x.idx`` mean x."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    is_prefix = any(_with(path, suffix).exists() for suffix in (".bin", ".idx"))
    return path if is_prefix and not path.exists() else None


def open_megatron(prefix: Path, cache: Cache) -> Entry:
    """The tokens of a pair of files.

    Raises:
        ConfigError: one is missing, cut short, damaged, or does not hold integers.
    """
    index_path, bin_path = _with(prefix, ".idx"), _with(prefix, ".bin")
    for path in (index_path, bin_path):
        if not path.is_file():
            refuse(path, "no such file; Megatron data are a .bin and an .idx of one name")
    try:
        index = _Index(index_path)
        size = bin_path.stat().st_size
        length = size // index.dtype.itemsize
        tokens = FileArray(bin_path, index.dtype, length=length)
    except OSError as error:
        refuse(prefix, f"cannot be read: {error.strerror or error}")

    def fill(writer: Writer) -> None:
        index.check(bin_path, size)
        try:
            _scan(tokens, writer, bin_path)
        except OSError as error:
            refuse(bin_path, f"cannot be read: {error.strerror or error}")
        index.add_ends(writer)

    return cache.entry([index_path, bin_path], "megatron", fill, dtype=index.dtype, in_place=tokens)


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _scan(tokens: FileArray, writer: Writer, path: Path) -> None:
    size = tokens.dtype.itemsize
    for start in range(0, len(tokens), _CHUNK):
        writer.add(
            tokens[start : start + _CHUNK],
            lambda i, start=start: f"{path.name}, byte {(start + i) * size}",  # type: ignore[misc] # start is bound, not given
        )


class _Index:
    """An index file whose size agrees with what it says. Raises ConfigError and OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
        self.dtype, self._num_sequences, num_borders = self._read_header(header)
        sizes = (self._num_sequences * 4, self._num_sequences * 8, num_borders * 8)
        needed = _HEADER.size + sum(sizes)
        size = path.stat().st_size
        if size < needed:
            refuse(
                path,
                f"is cut short at byte {size}: {self._num_sequences} sequences and {num_borders} "
                f"document borders take {needed} bytes; write it again",
            )
        at = _HEADER.size
        self._lengths = FileArray(path, "<i4", length=self._num_sequences, offset=at)
        self._offsets = FileArray(path, "<i8", length=self._num_sequences, offset=at + sizes[0])
        self._borders = FileArray(path, "<i8", length=num_borders, offset=at + sizes[0] + sizes[1])

    def _read_header(self, header: bytes) -> tuple[np.dtype[Any], int, int]:
        if header.startswith(_OLD_MAGIC):
            refuse(self._path, "is an index of the older TNTIDX format; write the data again")
        if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
            refuse(self._path, "is not a Megatron index (byte 0: no MMIDIDX)")
        if len(header) < _HEADER.size:
            refuse(
                self._path,
                f"is cut short at byte {len(header)}, in its header of {_HEADER.size} bytes",
            )
        _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
        if version != 1:
            refuse(self._path, f"is of version {version}, but only version 1 is known", "byte 9")
        if code in _FLOATS:
            refuse(self._path, f"is of {_FLOATS[code]} numbers, not of token ids", "byte 17")
        if code not in _INTEGERS:
            refuse(self._path, f"says that ids are of type {code}, which is unknown", "byte 17")
        return np.dtype(_INTEGERS[code]), num_sequences, num_borders

    def check(self, bin_path: Path, bin_size: int) -> None:
        """Compare with the file of tokens. Raises ConfigError."""
        num_tokens = 0
        size = self.dtype.itemsize
        for start in range(0, self._num_sequences, _CHUNK):
            lengths = self._lengths[start : start + _CHUNK].astype(np.int64)
            if (lengths < 0).any():
                bad = int((lengths < 0).argmax())
                refuse(self._path, f"has {lengths[bad]} tokens", f"sequence {start + bad}")
            expected = (num_tokens + np.cumsum(lengths) - lengths) * size
            offsets = self._offsets[start : start + _CHUNK]
            if (wrong := offsets != expected).any():
                bad = int(wrong.argmax())
                refuse(
                    self._path,
                    f"begins at byte {offsets[bad]} instead of {expected[bad]}: sequences must "
                    "follow each other",
                    f"sequence {start + bad}",
                )
            num_tokens += int(lengths.sum())
        if bin_size != num_tokens * size:
            what = "is cut short at" if bin_size < num_tokens * size else "goes on to"
            refuse(
                bin_path,
                f"{what} byte {bin_size}: its index tells of {num_tokens} tokens of {size} bytes, "
                f"{num_tokens * size} bytes",
            )

    def add_ends(self, writer: Writer) -> None:
        """Give a writer the ends of all documents. Raises ConfigError."""
        last = 0
        for start in range(0, len(self._borders), _CHUNK):
            borders = self._borders[start : start + _CHUNK].astype(np.int64)
            steps = np.diff(borders, prepend=last)
            if (wrong := (steps < 0) | (borders > self._num_sequences)).any():
                bad = int(wrong.argmax())
                refuse(
                    self._path,
                    f"is {borders[bad]}, but borders ascend to {self._num_sequences} sequences",
                    f"document border {start + bad}",
                )
            last = int(borders[-1])
            writer.add_ends(self._tokens_before(borders, writer.num_tokens))

    def _tokens_before(self, sequences: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
        """The number of tokens before each of some sequences, which ascend."""
        first, last = int(sequences[0]), int(sequences[-1])
        ends = np.append(self._offsets[first : last + 1], num_tokens * self.dtype.itemsize)
        return (ends[sequences - first] // self.dtype.itemsize).astype(np.int64)
