"""Text as training samples: found, checked and memory-mapped before any worker starts.

Text is used byte by byte, so that any text works with any vocabulary of at least 256 tokens. It is
cut into windows of ``seq_len + 1`` tokens that do not overlap; a window's tokens are its input and
the same tokens one place further its labels. Which window is used when is decided by
`eth_cli.launch.runtime.data`.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from eth_cli.errors import ConfigError

Tokens: TypeAlias = NDArray[np.int64]

IGNORED_LABEL = -100
"""Label of a position that counts neither in the loss nor in the number of valid tokens."""
BYTE_VOCABULARY = 256
"""Tokens of the byte-level vocabulary."""

_CHUNK_BYTES = 2**22
_CACHE_FORMAT = 2
_BUILT_IN = "built-in text"
_SEPARATOR = b"\n"


class TokenSource(Protocol):
    """Samples by index; the same on every rank, so that ranks need not tell each other."""

    @property
    def digest(self) -> str:
        """Changes with the tokens, and with nothing else: not with where they are kept."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels of a sample, each ``(seq_len,)``."""

    def num_valid(self, index: int) -> int:
        """How many labels of a sample are not `IGNORED_LABEL`, without reading the sample."""


class WindowedTokens:
    """A sequence of tokens cut into windows of ``seq_len + 1``.

    A last window cut short is filled up with ignored labels; one without any label is left out.
    """

    def __init__(self, tokens: NDArray[np.integer], *, seq_len: int, digest: str) -> None:
        """``digest`` is of ``tokens``."""
        self.digest = digest
        self._tokens = tokens
        self._seq_len = seq_len
        full, rest = divmod(len(tokens), seq_len + 1)
        self._num_samples = full + (rest >= 2)

    @property
    def num_samples(self) -> int:
        """Number of windows."""
        return self._num_samples

    def _window(self, index: int) -> NDArray[np.integer]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        width = self._seq_len + 1
        return self._tokens[index * width : (index + 1) * width]

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels of a window, each ``(seq_len,)``."""
        window = self._window(index)
        tokens = np.zeros(self._seq_len, dtype=np.int64)
        labels = np.full(self._seq_len, IGNORED_LABEL, dtype=np.int64)
        tokens[: len(window) - 1] = window[:-1]
        labels[: len(window) - 1] = window[1:]
        return tokens, labels

    def num_valid(self, index: int) -> int:
        """Labels of a window that are not filling."""
        return len(self._window(index)) - 1


def open_source(path: str | None, *, seq_len: int, vocab_size: int) -> TokenSource:
    """The samples of a text file, of a folder's ``*.txt`` in order of name, or of built-in text.

    Raises:
        ConfigError: the data is absent, empty, not UTF-8, shorter than one sample, or the model's
            vocabulary has no room for bytes.
    """
    name = path if path is not None else _BUILT_IN
    if vocab_size < BYTE_VOCABULARY:
        raise ConfigError.single(
            name,
            "",
            f"needs {BYTE_VOCABULARY} tokens (text is used byte by byte), but the model's "
            f"vocab_size is {vocab_size}; choose a model with a larger one",
        )
    tokens, digest = _built_in_text() if path is None else _tokens_of(Path(path))
    if len(tokens) < seq_len + 1:
        raise ConfigError.single(
            name,
            "",
            f"has {len(tokens)} tokens, fewer than one sample of seq_len + 1 = {seq_len + 1}; "
            "give more text or plan with a smaller seq_len",
        )
    return WindowedTokens(tokens, seq_len=seq_len, digest=digest)


def _built_in_text() -> tuple[NDArray[np.uint8], str]:
    """The language reference that ships with Python, so that a first try needs no data."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError.single(
            "--data", "", "this Python ships no language reference to train on; give a text file"
        ) from None
    text = "\n\n".join(topics[key] for key in sorted(topics)).encode()
    return np.frombuffer(text, dtype=np.uint8), f"sha256:{sha256(text).hexdigest()}"


def _tokens_of(path: Path) -> tuple[NDArray[np.uint8], str]:
    """The bytes of all files of a path, memory-mapped from the cache, which is filled if needed.

    And their digest, which is part of the cached file's name: computed once, while it is filled.
    """
    files = _text_files(path)
    key = _key(files)
    cached = next(_cache_folder().glob(f"{key}-*.bin"), None) or _fill_cache(key, files)
    if cached.stat().st_size == 0:
        _refuse(path, "is empty; give a file with text")
    digest = cached.stem.removeprefix(f"{key}-")
    return np.memmap(cached, dtype=np.uint8, mode="r"), f"sha256:{digest}"


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix == ".txt" and p.is_file())
        if not files:
            _refuse(path, "holds no *.txt file; give a text file or a folder of them")
        return files
    if not path.exists():
        _refuse(path, "no such file or folder; give a text file or a folder of *.txt files")
    if not path.is_file():
        _refuse(path, "is neither a file nor a folder")
    return [path]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "eth" / "tokens"


def _key(files: Sequence[Path]) -> str:
    """Changes with the path, size or time of any file, so that a stale cache is never read."""
    try:
        facts = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files
        ]
    except OSError as error:
        _refuse(files[0].parent, f"cannot be read: {error.strerror}")
    return sha256(json.dumps([_CACHE_FORMAT, facts]).encode()).hexdigest()[:32]


def _fill_cache(key: str, files: Sequence[Path]) -> Path:
    """Write checked bytes beside, then rename: two runs may fill the same cache at once."""
    folder = _cache_folder()
    aside = folder / f".{key}.{os.getpid()}.tmp"
    digest = sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as out:
            for i, file in enumerate(files):
                for chunk in chain([_SEPARATOR] if i else [], _checked_chunks(file)):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        cached = folder / f"{key}-{digest.hexdigest()}.bin"
        os.replace(aside, cached)
        return cached
    except OSError as error:
        raise ConfigError.single(
            str(folder),
            "",
            f"the token cache cannot be written: {error.strerror}; set XDG_CACHE_HOME to a "
            "folder that can",
        ) from None
    finally:
        with contextlib.suppress(OSError):  # where it could not be made it cannot be removed
            aside.unlink(missing_ok=True)


def _checked_chunks(file: Path) -> Iterator[bytes]:
    """A file's bytes, piece by piece, each checked to be UTF-8 before it is given out."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with open(file, "rb") as text:
            while True:
                chunk = text.read(_CHUNK_BYTES)
                num_held = len(decoder.getstate()[0])
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    at = position - num_held + error.start
                    _refuse(file, f"is not UTF-8 text (byte {at}); save it as UTF-8")
                if not chunk:
                    return
                position += len(chunk)
                yield chunk
    except OSError as error:
        _refuse(file, f"cannot be read: {error.strerror}")


def _refuse(path: Path, message: str) -> NoReturn:
    raise ConfigError.single(str(path), "", message)
