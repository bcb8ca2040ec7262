"""Documents of text files and of JSONL files, as streams of checked text.

A stream has pieces of text, and `END` after each document. A text file is one document; a line of
JSONL is one, its text under a key. What is wrong is told with the line or the byte.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eth_cli.faults import did_you_mean, some_of
from eth_cli.launch.data.cache import refuse
from eth_cli.launch.data.vocabulary import END

_CHUNK_BYTES = 2**22
_LONGEST_LINE_BYTES = 2**28
"""A longer line of JSONL is refused: it is in memory as a whole."""


def text_stream(files: Sequence[Path]) -> Iterator[str | None]:
    """Every text file as a document. Raises ConfigError: unreadable, or not UTF-8."""
    for file in files:
        yield from _file_text(file)
        yield END


def _file_text(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with open(file, "rb") as text:
            while True:
                chunk = text.read(_CHUNK_BYTES)
                num_held = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    at = position - num_held + error.start
                    refuse(file, f"is not UTF-8 text (byte {at}); save it as UTF-8")
                if not chunk:
                    return
                position += len(chunk)
    except OSError as error:
        refuse(file, f"cannot be read: {error.strerror}")


def jsonl_stream(files: Sequence[Path], *, field: str) -> Iterator[str | None]:
    """Every line's text under ``field`` as a document.

    Raises:
        ConfigError: a file cannot be read, or a line is empty, not UTF-8, not a JSON object, or has
            no such text.
    """
    for file in files:
        for number, line in _lines(file):
            yield _line_text(file, number, line, field)
            yield END


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(file, "rb") as lines:
            number = 0
            while line := lines.readline(_LONGEST_LINE_BYTES):
                number += 1
                if len(line) == _LONGEST_LINE_BYTES:
                    refuse(
                        file,
                        f"is longer than {_LONGEST_LINE_BYTES} bytes; is this JSONL, a document a "
                        "line?",
                        f"line {number}",
                    )
                yield number, line
    except OSError as error:
        refuse(file, f"cannot be read: {error.strerror}")


def _line_text(file: Path, number: int, line: bytes, field: str) -> str:
    at = f"line {number}"
    if not line.strip():
        refuse(file, "is empty; every line of a JSONL file is a JSON object", at)
    try:
        record = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        refuse(file, f"is not UTF-8 text (byte {error.start} of the line); save it as UTF-8", at)
    except json.JSONDecodeError as error:
        refuse(file, f"is not valid JSON: {error.msg} (column {error.colno})", at)
    except (ValueError, RecursionError):
        refuse(file, "is not valid JSON", at)
    if not isinstance(record, dict):
        refuse(file, f"is not a JSON object but {_kind(record)}", at)
    if field not in record:
        names = some_of(sorted(record)) if record else "none"
        hint = did_you_mean(field, record)
        refuse(file, f"has no field {field!r}{hint}, it has {names}; see --text-field", at)
    text = record[field]
    if not isinstance(text, str):
        refuse(file, f"the field {field!r} is {_kind(text)}, not a text", at)
    if not _is_encodable(text):
        refuse(file, f"the field {field!r} holds half of a surrogate pair", at)
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
