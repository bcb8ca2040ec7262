"""Files to and from frozen typed objects: strict reading that says where, deterministic writing.

Pydantic does the checking and `eth_cli.faults` words its errors; this module finds duplicate keys
(which plain JSON and YAML readers drop silently), bounds what it reads, and writes atomically.
Each file format itself lives in its owner module (cluster, plan, profile.table).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from eth_cli import stdout
from eth_cli.errors import ConfigError, Fault
from eth_cli.faults import FieldError, Location, faults_of, format_location, shown

__all__ = [
    "MAX_FILE_BYTES",
    "SCHEMA_VERSION",
    "FieldError",
    "Location",
    "Record",
    "config_error",
    "digest",
    "dump_json",
    "format_location",
    "parse_json",
    "parse_yaml",
    "read_json",
    "read_text",
    "read_yaml",
    "to_data",
    "validate",
    "write_json",
    "write_text",
]

SCHEMA_VERSION = 1
"""Version of profile.json and plan.json that this release reads and writes."""

MAX_FILE_BYTES = 64 * 2**20
"""A larger configuration file is refused: reading it could only exhaust memory."""


class Record(BaseModel):
    """Base of every typed object that a file holds: frozen, strict, no unknown keys, no NaN."""

    label_keys: ClassVar[tuple[str, ...]] = ()
    """Keys whose values tell a person which entry of a list a fault is about."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )


RecordT = TypeVar("RecordT", bound=Record)


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file.

    Raises:
        ConfigError: the file is absent, unreadable, empty, too large or not UTF-8.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError.single(str(path), "", "is a folder, not a file")
        with open(path, "rb") as file:
            # A device may have no end and says no size: so look at what is read, not at what is
            # said.
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError.single(
                str(path), "", f"has more than {MAX_FILE_BYTES} bytes, the most that is read"
            )
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError.single(str(path), "", "no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError.single(
            str(path), "", f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError.single(str(path), "", f"cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ConfigError.single(str(path), "", "is empty")
    return text


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} stands twice in one object")
        result[key] = value
    return result


def parse_json(text: str, file: str) -> Any:
    """JSON text as plain data. Raises ConfigError on broken syntax or duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        raise ConfigError.single(
            file, f"line {error.lineno}", f"is not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except RecursionError:
        raise ConfigError.single(file, "", "is nested too deeply") from None
    except ValueError as error:
        raise ConfigError.single(file, "", _syntax_problem(error)) from None


def _syntax_problem(error: Exception) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    # Python's own limit, against numbers that take minutes to convert.
    return "holds a number of too many digits" if "integer string conversion" in text else text


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without duplicate keys and without aliases (which can expand without bound)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call] # the stubs lack it
            raise yaml.constructor.ConstructorError(
                None,
                None,
                "aliases (*name) are not supported; write the value out",
                event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:  # A number or a date that cannot be one.
            raise yaml.constructor.ConstructorError(
                None, None, _syntax_problem(error), node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = ""
            if not isinstance(key, str):
                problem = f"the key {shown(key)} must be a text; put it in quotes"
            elif key in seen:
                problem = f"the key {shown(key)} stands twice in one mapping"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# PyYAML takes 1e-5 for a text, because YAML 1.1 wants 1.0e-5; JSON and YAML 1.2 have no such rule.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, file: str) -> Any:
    """YAML text as plain data. Raises ConfigError on broken syntax, duplicate keys or aliases."""
    try:
        # _UniqueKeyLoader is a SafeLoader: it builds plain data only.
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}" if mark is not None else ""
        raise ConfigError.single(file, place, f"is not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigError.single(file, "", "is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError.single(file, "", f"is not valid YAML: {_syntax_problem(error)}") from None


def validate(record_type: type[RecordT], data: Any, file: str) -> RecordT:
    """Plain data as a typed object.

    Raises:
        ConfigError: with every fault at once.
    """
    if not isinstance(data, dict):
        raise ConfigError.single(
            file, "", f"must hold a mapping of keys to values, not {shown(data)}"
        )
    try:
        # Through JSON, because strict mode then takes a list for a tuple and text for an enum.
        return record_type.model_validate_json(json.dumps(data, default=_plain))
    except RecursionError:
        raise ConfigError.single(file, "", "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise config_error(error, record_type, file, data) from None


def _plain(value: object) -> str:
    # YAML makes dates of texts such as 2026-01-31; its other types have no meaning here.
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__}; write texts, numbers, lists and mappings only")


def config_error(
    error: Exception, record_type: type[Record], file: str, data: Any = None
) -> ConfigError:
    """What went wrong while building a typed object (from ``data``), as faults of a file."""
    if isinstance(error, ValidationError):
        return ConfigError(faults_of(error, record_type, file, data))
    if isinstance(error, FieldError):
        return ConfigError(
            Fault(file=file, field=format_location(loc), message=text) for loc, text in error.faults
        )
    return ConfigError.single(file, "", f"holds what cannot be read: {error}")


def read_json(path: str | Path, record_type: type[RecordT]) -> RecordT:
    """A JSON file as a typed object. Raises ConfigError with every fault at once."""
    data = parse_json(read_text(path), str(path))
    return validate(record_type, data, str(path))


def read_yaml(path: str | Path, record_type: type[RecordT]) -> RecordT:
    """A YAML file as a typed object. Raises ConfigError with every fault at once."""
    data = parse_yaml(read_text(path), str(path))
    return validate(record_type, data, str(path))


def to_data(record: Record) -> dict[str, Any]:
    """Plain JSON data of a typed object, absent (None) values left out."""
    return record.model_dump(mode="json", exclude_none=True, by_alias=True)


def dump_json(data: Any) -> str:
    """JSON text for people and tools: two-space indent, stable, one trailing newline."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def digest(data: Any) -> str:
    """SHA-256 of the canonical JSON form of plain data, as ``sha256:<hex>``."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or none of it: beside, flushed to disk, then renamed into place.

    A symbolic link stays and the file that it leads to is replaced. What exists and is no file of
    its own (a device, a pipe, this process's stdout) is written to as it is.

    Raises:
        ConfigError: the folder is absent or not writable, or the path is a folder itself.
        StdoutFullError, ReaderGoneError: the path is this process's stdout, and that takes no more.
    """
    if stdout.is_stdout(path):
        stdout.write(text)
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            _write_through(path, text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise ConfigError.single(str(path), "", f"cannot be written: {error.strerror}") from None


def _write_through(path: str | Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    # Not a fixed name: two commands may write the same file at once.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):  # In a read-only folder there is nothing to remove.
            aside.unlink()
        raise


def write_json(path: str | Path, record: Record) -> None:
    """Write a typed object as JSON, atomically; the same object gives the same bytes."""
    write_text(path, dump_json(to_data(record)))
