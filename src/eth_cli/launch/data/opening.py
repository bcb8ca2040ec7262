"""The data of a run: what a path means, opened, checked against the model, and put together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eth_cli.errors import ConfigError
from eth_cli.launch.config import DataOptions, DataPath
from eth_cli.launch.data import megatron, texts
from eth_cli.launch.data.cache import Cache, Entry, Facts, Writer, refuse
from eth_cli.launch.data.vocabulary import (
    BYTES,
    END,
    ByteVocabulary,
    FileVocabulary,
    TextStream,
    Vocabulary,
    write_documents,
)
from eth_cli.launch.dataset import Borders, Mixture, TokenSource, WindowedTokens

_BUILT_IN = "built-in text"
_TEXT = ".txt"
_JSONL = (".jsonl", ".ndjson", ".json")
_FOLDER_KINDS = (_TEXT, *_JSONL)
"""Names of files that a folder is searched for, by their end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run trains on."""

    train: TokenSource


def open_data(options: DataOptions, *, seq_len: int, vocab_size: int) -> Data:
    """Open everything that a run needs; what was not read before is read, once, into the cache.

    Raises:
        ConfigError: data or tokenizer are absent or damaged, or do not go with the model.
    """
    opener = _Opener(options, seq_len=seq_len, vocab_size=vocab_size)
    if not options.paths:
        return Data(train=opener.built_in())
    sources = [opener.open(Path(entry.path)) for entry in options.paths]
    if len(sources) == 1:
        return Data(train=sources[0])
    return Data(train=Mixture(sources, weights_of(options.paths)))


def weights_of(paths: Sequence[DataPath]) -> tuple[float, ...] | None:
    """The weights of several sources; None where none has one. Raises ConfigError."""
    weights = [entry.weight for entry in paths if entry.weight is not None]
    if not weights:
        return None
    if len(weights) < len(paths):
        without = next(entry.path for entry in paths if entry.weight is None)
        refuse(without, "has no weight, but others have; give all of --data a weight or none")
    return tuple(weights)


class _Opener:
    """Opens paths for one model."""

    def __init__(self, options: DataOptions, *, seq_len: int, vocab_size: int) -> None:
        self._options = options
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._cache = Cache(None if options.cache is None else Path(options.cache))
        self._opened_vocabulary: Vocabulary | None = None

    def _vocabulary(self, path: Path | str) -> Vocabulary:
        """What text becomes tokens by; only where there is text. Raises ConfigError."""
        if self._opened_vocabulary is None:
            self._opened_vocabulary = self._open_vocabulary(path)
        return self._opened_vocabulary

    def _open_vocabulary(self, path: Path | str) -> Vocabulary:
        name = self._options.tokenizer
        if name is None or name == BYTES:
            if self._vocab_size < ByteVocabulary.size:
                refuse(
                    path,
                    f"needs {ByteVocabulary.size} tokens (text is used byte by byte), but the "
                    f"model's vocab_size is {self._vocab_size}; choose a model with a larger one",
                )
            return ByteVocabulary()
        vocabulary = FileVocabulary(Path(name))
        if vocabulary.size > self._vocab_size:
            refuse(
                name,
                f"has {vocabulary.size} tokens, but the model's vocab_size is {self._vocab_size}; "
                "choose the model's own tokenizer or a model with a larger one",
            )
        return vocabulary

    def built_in(self) -> TokenSource:
        """The language reference that ships with Python, so that a first try needs no data."""
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ConfigError.single(
                "--data", "", "this Python ships no language reference to train on; give a file"
            ) from None
        vocabulary = self._vocabulary(_BUILT_IN)
        text = "\n\n".join(topics[key] for key in sorted(topics))
        parts = [part for part in vocabulary.encode([text]) if part is not END]
        tokens = np.concatenate(parts).astype(vocabulary.dtype)
        return self._windows(_BUILT_IN, _in_memory(tokens))

    def open(self, path: Path) -> TokenSource:
        """The samples of a path. Raises ConfigError."""
        prefix = megatron.megatron_prefix(path)
        if prefix is not None:
            return self._windows(path, megatron.open_megatron(prefix, self._cache))
        files = _files_of(path)
        if files[0].suffix in _JSONL:
            field = self._options.text_field
            return self._text(path, files, texts.jsonl_stream(files, field=field), [field])
        return self._text(path, files, texts.text_stream(files), [])

    def _text(
        self, path: Path, files: Sequence[Path], stream: TextStream, how: list[str]
    ) -> TokenSource:
        vocabulary = self._vocabulary(path)

        def fill(writer: Writer) -> None:
            write_documents(writer, vocabulary, stream)

        key = [files[0].suffix in _JSONL, how, vocabulary.key]
        entry = self._cache.entry(files, key, fill, dtype=vocabulary.dtype)
        return self._windows(path, entry)

    def _windows(self, path: Path | str, entry: Entry) -> TokenSource:
        """Windows over an entry that goes with the model. Raises ConfigError."""
        facts = entry.facts
        if facts.num_tokens == 0:
            refuse(path, "is empty; give a file with text")
        if facts.num_tokens < self._seq_len + 1:
            refuse(
                path,
                f"has {facts.num_tokens} tokens, fewer than one sample of seq_len + 1 = "
                f"{self._seq_len + 1}; give more text or plan with a smaller seq_len",
            )
        self._check_ids(path, facts)
        digest = f"sha256:{facts.tokens_digest}"
        if not self._options.ignore_borders:
            return WindowedTokens(entry.tokens, seq_len=self._seq_len, digest=digest)
        return WindowedTokens(
            entry.tokens,
            seq_len=self._seq_len,
            digest=f"{digest} with borders sha256:{facts.ends_digest}",
            borders=Borders(entry.ends),
        )

    def _check_ids(self, path: Path | str, facts: Facts) -> None:
        for extreme in (facts.smallest, facts.largest):
            if extreme is not None and not 0 <= extreme.id < self._vocab_size:
                refuse(
                    path,
                    f"holds the token id {extreme.id} ({extreme.at}), but the model's vocab_size "
                    f"is {self._vocab_size}; choose the model that the data were made for",
                )


def _in_memory(tokens: np.ndarray) -> Entry:
    facts = Facts(
        dtype=tokens.dtype.str,
        num_tokens=len(tokens),
        num_documents=1,
        tokens_digest=hashlib.sha256(tokens.data).hexdigest(),
        ends_digest="",
    )
    return Entry(tokens=tokens, ends=np.array([len(tokens)]), facts=facts)


def _files_of(path: Path) -> list[Path]:
    """The files of a path, all of one kind, in order of name. Raises ConfigError."""
    if path.is_dir():
        return _files_in(path)
    if not path.exists():
        refuse(
            path,
            "no such file or folder; give a text or JSONL file, a folder of such files, "
            "or the prefix of Megatron's .bin and .idx",
        )
    if not path.is_file():
        refuse(path, "is neither a file nor a folder")
    return [path]


def _files_in(folder: Path) -> list[Path]:
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in _FOLDER_KINDS and p.is_file())
    except OSError as error:
        refuse(folder, f"cannot be read: {error.strerror}")
    if not files:
        refuse(folder, "holds no *.txt and no *.jsonl file; give a file or a folder of them")
    kinds = sorted({_TEXT if file.suffix == _TEXT else _JSONL[0] for file in files})
    if len(kinds) > 1:
        refuse(folder, f"holds both *{kinds[0]} and *{kinds[1]} files; give the files themselves")
    return files
