"""What happened when: spans, scalars and instants, one JSON object a line. Owns events/*.jsonl.

The simulator and the workers write the same records, so one tool draws both. Measured times are
seconds since the Unix epoch, simulated ones seconds since the start of the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeAlias

from eth_cli.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time on one rank."""

    kind: ClassVar[str] = "span"
    rank: int
    name: str
    """F, B (compute), SYNC (gradient all-reduce of a segment), OPTIMIZER, STEP, CHECKPOINT, ..."""
    start_s: float
    stop_s: float
    step: int | None = None
    pipeline: int | None = None
    stage: int | None = None
    micro_batch: int | None = None
    blocks: tuple[int, int] | None = None
    """Half-open range of blocks that the span is about."""

    @property
    def duration_s(self) -> float:
        """Length [s]."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A number measured on one rank."""

    kind: ClassVar[str] = "scalar"
    rank: int
    name: str
    """Name with its unit, such as ``peak_memory_bytes``."""
    value: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """Something that happened on one rank."""

    kind: ClassVar[str] = "instant"
    rank: int
    name: str
    time_s: float
    step: int | None = None
    detail: str = ""


Event: TypeAlias = Span | Scalar | Instant
_TYPES: dict[str, type[Span] | type[Scalar] | type[Instant]] = {
    "span": Span,
    "scalar": Scalar,
    "instant": Instant,
}


def to_json(event: Event) -> str:
    """One line of JSON, absent fields left out."""
    data: dict[str, object] = {"kind": event.kind}
    for field in fields(event):
        value = getattr(event, field.name)
        if value is not None and value != "":
            data[field.name] = value
    return json.dumps(data, separators=(",", ":"))


def from_json(line: str) -> Event:
    """The event of one line. Raises ValueError when it is not one."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("kind") not in _TYPES:
        raise ValueError(f"not an event: {line[:80]!r}")
    event_type = _TYPES[data.pop("kind")]
    if isinstance(data.get("blocks"), list):
        data["blocks"] = tuple(data["blocks"])
    for name, value in data.items():
        if name in _CHECKS and not _CHECKS[name](value):
            raise ValueError(f"{name} cannot be {value!r}")
    try:
        return event_type(**data)
    except TypeError as error:
        raise ValueError(f"not an event: {error}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value)  # type: ignore[arg-type] # it is a number


def _is_range(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_whole, value))


_CHECKS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("rank", "step", "pipeline", "stage", "micro_batch"), _is_whole),
    **dict.fromkeys(("start_s", "stop_s", "time_s"), _is_number),
    "name": lambda value: isinstance(value, str),
    "blocks": _is_range,
}
"""What a field of an event may hold. A scalar's value may be anything that JSON calls a number."""


def write_events(path: str | Path, events: Iterable[Event]) -> None:
    """Append events to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(to_json(event) + "\n" for event in events)


def read_events(path: str | Path) -> Iterator[Event]:
    """Events of a file. A last line cut short by a crash is left out.

    Raises:
        ConfigError: the file cannot be read, or a line other than the last is not an event.
    """
    try:
        with open(path, encoding="utf-8") as file:
            last = ""
            for i, line in enumerate(file):
                if last:
                    yield _event_of_line(last, path, i)
                last = line
    except OSError as error:
        raise ConfigError.single(str(path), "", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError.single(str(path), "", "is not UTF-8 text") from None
    try:
        event = from_json(last)
    except ValueError:
        return
    yield event


def _event_of_line(line: str, path: str | Path, number: int) -> Event:
    try:
        return from_json(line)
    except ValueError as error:
        raise ConfigError.single(str(path), f"line {number}", str(error)) from None


def by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """The spans of each rank that has any, in the order given."""
    found: dict[int, list[Span]] = {}
    for span in spans:
        found.setdefault(span.rank, []).append(span)
    return found
