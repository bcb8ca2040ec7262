"""Text to token ids: byte by byte, or by a tokenizer.json of the `tokenizers` library.

Text comes as a stream of pieces, with `END` after each document, so that no document need be in
memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from eth_cli.launch.data.cache import Writer, refuse

END: Final = None
"""In a stream of text or tokens: a document ends here."""
BYTES: Final = "bytes"
"""Name of the byte-level vocabulary."""

_PIECE_CHARACTERS = 2**20
"""A tokenizer is given so much text at once; longer text is cut at the end of a line."""
_JOINT = np.frombuffer(b"\n", dtype=np.uint8)

TextStream = Iterable[str | None]
TokenStream = Iterator[NDArray[np.integer] | None]

END_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    *("<|end▁of▁sentence|>", "[SEP]"),
)
"""Names of the token that ends a document, for a tokenizer that does not say it; the first one."""


class Vocabulary(Protocol):
    """How text becomes token ids."""

    @property
    def size(self) -> int:
        """Every id is smaller."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id."""

    @property
    def key(self) -> Any:
        """JSON data that changes with the ids that a text gets."""

    @property
    def end(self) -> NDArray[np.integer] | None:
        """Token that ends each document."""

    @property
    def joint(self) -> NDArray[np.integer] | None:
        """Token between two documents, where none ends them."""

    def encode(self, text: TextStream) -> TokenStream:
        """The ids of a stream of text, each `END` in its place."""


def write_documents(writer: Writer, vocabulary: Vocabulary, text: TextStream) -> None:
    """Encode documents into an entry, with what ends or joins them. Empty documents are none."""
    is_empty, is_joint_due = True, False
    for tokens in vocabulary.encode(text):
        if tokens is not END:
            if not len(tokens):
                continue
            if is_joint_due and vocabulary.joint is not None:
                writer.add(vocabulary.joint)
                writer.end_document()
            is_empty, is_joint_due = False, False
            writer.add(tokens)
        elif not is_empty:
            is_empty, is_joint_due = True, True
            if vocabulary.end is not None:
                writer.add(vocabulary.end)
            if vocabulary.joint is None:
                writer.end_document()


class ByteVocabulary:
    """UTF-8 bytes: any text works with any model of at least 256 tokens."""

    size = 256
    dtype = np.dtype(np.uint8)
    key = BYTES
    end = None
    joint = _JOINT

    def encode(self, text: TextStream) -> TokenStream:
        """The bytes of a stream of text."""
        for piece in text:
            yield END if piece is END else np.frombuffer(piece.encode(), dtype=np.uint8)


class FileVocabulary:
    """A tokenizer.json. It adds no special tokens of its own but the end of each document."""

    joint = None

    def __init__(self, path: Path) -> None:
        """``path`` is the file, or a folder with one of that name, as models have it.

        Raises:
            ConfigError: the `tokenizers` library is absent, or the file is not one of its.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            refuse(path, "needs the tokenizers library; pip install 'eth-cli[hf]'")
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            refuse(path, "no such tokenizer file; give a tokenizer.json, or bytes")
        except OSError as error:
            refuse(file, f"cannot be read: {error.strerror}")
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more precise
            refuse(file, f"is not a tokenizer.json that tokenizers can read: {_first_line(error)}")
        # A file may ask for what is meant for single inputs of a model, not for text to train on.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        self.dtype = np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)
        name = _end_token(file, ids)
        self.end = None if name is None else np.array([ids[name]], dtype=self.dtype)
        self.key = [hashlib.sha256(content).hexdigest(), name]

    def encode(self, text: TextStream) -> TokenStream:
        """The ids of a stream of text, some pieces at once."""
        batch: list[str | None] = []
        num_characters = 0
        for piece in _cut(text):
            batch.append(piece)
            num_characters += 0 if piece is END else len(piece)
            if num_characters >= _PIECE_CHARACTERS:
                yield from self._encode(batch)
                batch.clear()
                num_characters = 0
        yield from self._encode(batch)

    def _encode(self, batch: list[str | None]) -> TokenStream:
        texts = [piece for piece in batch if piece is not END]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for piece in batch:
            yield END if piece is END else np.array(next(encoded).ids, dtype=self.dtype)


def _cut(text: TextStream) -> Iterator[str | None]:
    """A stream of text in pieces of limited size that end, where they can, with a line or a word.

    Where pieces end depends on the text alone, not on the pieces that it came in.
    """
    held = ""
    for part in text:
        if part is END:
            yield from (held, END) if held else (END,)
            held = ""
            continue
        held += part
        start = 0
        while len(held) - start > _PIECE_CHARACTERS:
            stop = _cut_at(held, start)
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def _cut_at(text: str, start: int) -> int:
    limit = start + _PIECE_CHARACTERS
    # A line takes its end along; a space begins the word after it.
    for at in (text.rfind("\n", start, limit) + 1, text.rfind(" ", start + 1, limit)):
        if at > start:
            return at
    return limit


def _end_token(file: Path, ids: dict[str, int]) -> str | None:
    """The name of the token that ends a text: by the tokenizer's configuration, or by its name."""
    try:
        config = json.loads((file.parent / "tokenizer_config.json").read_bytes())
        token = config["eos_token"]
        name = token["content"] if isinstance(token, dict) else token
        if name in ids:
            return str(name)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it is optional, and made for other programs
    return next((name for name in END_TOKENS if name in ids), None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
