"""The token cache: what was tokenised or checked once is never again, whoever asks.

An entry is a folder, named by what it was made from: ``tokens.bin`` (unless the tokens are read
where they are), ``ends.bin`` (int64, the number of tokens up to the end of each document) and
``entry.json``. It is made under another name and renamed, so that it is whole or absent, by one
process at a time; others wait for it. Owns the format of entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.launch.data.files import FileArray, Integers
from eth_cli.serde import Record

_FORMAT = 3
"""Part of every entry's name: a change of the format makes new entries."""
_FLUSH_DOCUMENTS = 2**16
"""Ends of documents that are held in memory while an entry is written."""


class Extreme(Record):
    """The smallest or the largest token id of an entry."""

    id: int
    at: str
    """Where it stands first, in words."""


class Facts(Record):
    """What is known of an entry; the contents of ``entry.json``."""

    dtype: str
    num_tokens: int
    num_documents: int
    tokens_digest: str
    """SHA-256 of the tokens as bytes."""
    ends_digest: str
    """SHA-256 of ``ends.bin``."""
    smallest: Extreme | None = None
    """None without tokens."""
    largest: Extreme | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Tokens of documents, one document after the other."""

    tokens: Integers
    ends: Integers
    """The number of tokens up to the end of each document; no document is empty."""
    facts: Facts


def _nowhere(_index: int) -> str:
    return ""


class Writer:
    """Takes the documents of an entry that is being made, part by part."""

    def __init__(self, folder: Path, *, dtype: Any, copies: bool = True) -> None:
        """Without ``copies`` tokens are looked at and not written. Raises OSError."""
        self._dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._num_documents = 0
        self._ended = 0
        self._pending: list[NDArray[np.int64]] = []
        self._smallest: Extreme | None = None
        self._largest: Extreme | None = None
        self._ends = open(folder / "ends.bin", "wb")  # noqa: SIM115 # `close` closes it
        self._tokens: IO[bytes] | None = None
        if copies:
            self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 # as above
        self._tokens_digest = hashlib.sha256()
        self._ends_digest = hashlib.sha256()

    def add(self, tokens: NDArray[np.integer], where: Callable[[int], str] = _nowhere) -> None:
        """More tokens of the present document; ``where`` tells in words where one of them stands.

        ``where`` is given an index of ``tokens``.
        """
        if not len(tokens):
            return
        self._note_extremes(tokens, where)
        data = np.ascontiguousarray(tokens, dtype=self._dtype).data
        self._tokens_digest.update(data)
        if self._tokens is not None:
            self._tokens.write(data)
        self.num_tokens += len(tokens)

    def _note_extremes(self, tokens: NDArray[np.integer], where: Callable[[int], str]) -> None:
        largest, smallest = int(tokens.max()), int(tokens.min())
        if self._largest is None or largest > self._largest.id:
            self._largest = Extreme(id=largest, at=where(int(tokens.argmax())))
        if self._smallest is None or smallest < self._smallest.id:
            self._smallest = Extreme(id=smallest, at=where(int(tokens.argmin())))

    def end_document(self) -> None:
        """The present document ends here; one without tokens is none."""
        self.add_ends(np.array([self.num_tokens]))

    def add_ends(self, ends: NDArray[np.integer]) -> None:
        """Ascending numbers of tokens at which documents end."""
        kept = ends[np.diff(ends, prepend=self._ended) > 0]
        if not len(kept):
            return
        self._ended = int(kept[-1])
        self._num_documents += len(kept)
        self._pending.append(kept.astype(np.int64))
        if len(self._pending) >= _FLUSH_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            data = np.concatenate(self._pending).astype("<i8").tobytes()
            self._ends_digest.update(data)
            self._ends.write(data)
            self._pending.clear()

    def finish(self) -> Facts:
        """Write what is pending, durably."""
        self.end_document()
        self._flush()
        for file in (self._tokens, self._ends):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return Facts(
            dtype=self._dtype.str,
            num_tokens=self.num_tokens,
            num_documents=self._num_documents,
            tokens_digest=self._tokens_digest.hexdigest(),
            ends_digest=self._ends_digest.hexdigest(),
            smallest=self._smallest,
            largest=self._largest,
        )

    def close(self) -> None:
        """Close the files."""
        for file in (self._tokens, self._ends):
            if file is not None:
                file.close()


Fill = Callable[[Writer], None]
"""Gives a writer all documents. Raises ConfigError with what is wrong with them."""


class Cache:
    """Entries in a folder, which is made when the first one is."""

    def __init__(self, root: Path | None = None) -> None:
        """Without ``root`` it is the user's own, as the XDG base directory specification says."""
        if root is None:
            user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            root = Path(user) / "eth" / "tokens"
        self.root = root

    def entry(
        self,
        files: Sequence[Path],
        how: Any,
        fill: Fill,
        *,
        dtype: Any,
        in_place: FileArray | None = None,
    ) -> Entry:
        """The entry made from these files as they are now; made by ``fill`` where there is none.

        Args:
            files: What it is made from.
            how: What else decides about its contents, as JSON data.
            fill: Gives the documents.
            dtype: Of the tokens.
            in_place: Tokens that are in a file already, and are only looked at.

        Raises:
            ConfigError: what ``fill`` raises; or the cache cannot be written.
        """
        name = _name(files, how)
        folder = self.root / name
        with contextlib.suppress(OSError, ConfigError):
            return _open(folder, in_place)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / f"{name}.lock"):
                with contextlib.suppress(OSError, ConfigError):
                    return _open(folder, in_place)  # another process has just made it
                _make(folder, fill, dtype=dtype, copies=in_place is None)
            return _open(folder, in_place)
        except OSError as error:
            raise ConfigError.single(
                str(self.root),
                "",
                f"the token cache cannot be written: {error.strerror or error}; give another "
                "folder with --data-cache, or set XDG_CACHE_HOME",
            ) from None


def _name(files: Sequence[Path], how: Any) -> str:
    """Changes with the path, size or time of any file, so that a stale entry is never read."""
    facts = []
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            refuse(file, f"cannot be read: {error.strerror}")
        facts.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps([_FORMAT, facts, how]).encode()).hexdigest()[:32]


def _open(folder: Path, in_place: FileArray | None) -> Entry:
    facts = serde.read_json(folder / "entry.json", Facts)
    ends = FileArray(folder / "ends.bin", "<i8", length=facts.num_documents)
    tokens = in_place
    if tokens is None:
        tokens = FileArray(folder / "tokens.bin", facts.dtype, length=facts.num_tokens)
    return Entry(tokens=tokens, ends=ends, facts=facts)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The system lets go of it when this process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path, fill: Fill, *, dtype: Any, copies: bool) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        with contextlib.closing(Writer(aside, dtype=dtype, copies=copies)) as writer:
            fill(writer)
            facts = writer.finish()
        serde.write_json(aside / "entry.json", facts)
        shutil.rmtree(folder, ignore_errors=True)  # there is only what could not be opened
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def refuse(path: Path | str, message: str, field: str = "") -> NoReturn:
    """Raise the ConfigError that says what is wrong with a file, and where in it."""
    raise ConfigError.single(str(path), field, message)
