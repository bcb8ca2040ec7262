"""Files to and from frozen typed objects: strict reading that says where, deterministic writing.

Pydantic does the checking; this module turns its errors into `Fault`s that name file, field and
the valid choices, finds duplicate keys (which plain JSON and YAML readers drop silently), and
writes atomically. Each file format itself lives in its owner module (cluster, plan, profile.table).
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from eth_cli.errors import ConfigError, Fault

SCHEMA_VERSION = 1
"""Version of profile.json and plan.json that this release reads and writes."""

MAX_FILE_BYTES = 64 * 2**20
"""A larger configuration file is refused: reading it could only exhaust memory."""

Location = tuple[str | int, ...]


class Record(BaseModel):
    """Base of every typed object that a file holds: frozen, strict, no unknown keys, no NaN."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


RecordT = TypeVar("RecordT", bound=Record)


class FieldError(ValueError):
    """Raised by a type's own checks: every rule broken, each with its place below that type."""

    def __init__(self, faults: Iterable[tuple[Location, str]]) -> None:
        self.faults = tuple(faults)
        super().__init__(
            "; ".join(
                f"{format_location(loc)}: {text}" if loc else text for loc, text in self.faults
            )
        )


def format_location(location: Iterable[str | int]) -> str:
    """``("nodes", 0, "type")`` as ``nodes[0].type``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file.

    Raises:
        ConfigError: the file is absent, unreadable, empty, too large or not UTF-8.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError.single(str(path), "", "is a folder, not a file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError.single(
                str(path), "", f"has {size} bytes; at most {MAX_FILE_BYTES} are read"
            )
        text = path.read_bytes().decode("utf-8")
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
            raise ValueError(f"the key {key!r} stands twice in one object")
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
        raise ConfigError.single(file, "", str(error)) from None


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

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                problem = f"the key {key!r} stands twice" if key in seen else "a key is a mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


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
        message = str(error).splitlines()[0]
        raise ConfigError.single(file, "", f"is not valid YAML: {message}") from None


def validate(record_type: type[RecordT], data: Any, file: str) -> RecordT:
    """Plain data as a typed object.

    Raises:
        ConfigError: with every fault at once.
    """
    if not isinstance(data, dict):
        raise ConfigError.single(
            file, "", f"must hold a mapping of keys to values, not {_kind_of(data)}"
        )
    try:
        # Through JSON, because strict mode then takes a list for a tuple and text for an enum.
        return record_type.model_validate_json(json.dumps(data, default=str))
    except (TypeError, ValueError) as error:
        raise config_error(error, record_type, file) from None


def config_error(error: Exception, record_type: type[Record], file: str) -> ConfigError:
    """What went wrong while building a typed object, as faults of a file."""
    if isinstance(error, ValidationError):
        return ConfigError(_faults(error, record_type, file))
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


def _kind_of(data: Any) -> str:
    names = {list: "a list", str: "a text", type(None): "nothing", bool: "a truth value"}
    return names.get(type(data), "a number")


def _faults(error: ValidationError, record_type: type[Record], file: str) -> list[Fault]:
    faults = []
    for detail in error.errors(include_url=False):
        location = _data_location(detail["loc"])
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            faults += [
                Fault(file=file, field=format_location((*location, *below)), message=text)
                for below, text in cause.faults
            ]
            continue
        faults.append(
            Fault(
                file=file,
                field=format_location(location),
                message=_message(detail, record_type),
            )
        )
    return faults


def _data_location(location: tuple[int | str, ...]) -> Location:
    # Pydantic adds the name of a validator or union member, which is no place in the file.
    return tuple(p for p in location if isinstance(p, int) or not (p.endswith(")") or "[" in p))


def _message(detail: Any, record_type: type[Record]) -> str:
    kind, value = detail["type"], detail.get("input")
    shown = (
        json.dumps(value, default=str) if not isinstance(value, dict | list) else _kind_of(value)
    )
    if isinstance(value, dict):
        shown = "a mapping"
    if kind == "extra_forbidden":
        owner = _owner_of(record_type, detail["loc"][:-1])
        valid = f"; valid keys are {', '.join(_keys_of(owner))}" if owner else ""
        return f"unknown key{valid}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "finite_number":
        return f"must be a finite number, not {value}"
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"must be {message}, not {shown}"


def _keys_of(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


def _owner_of(
    record_type: type[BaseModel], location: Iterable[int | str]
) -> type[BaseModel] | None:
    """The record type that stands at a place, found by following the annotations."""
    current: Any = record_type
    for part in location:
        if isinstance(part, str) and _is_record(current):
            fields = {f.alias or n: f.annotation for n, f in current.model_fields.items()}
            current = fields.get(part)
        else:
            arguments = typing.get_args(_without_none(current))
            current = next((a for a in reversed(arguments) if a is not Ellipsis), None)
    current = _without_none(current)
    return current if _is_record(current) else None


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return members[0] if members else None
    return annotation


def _is_record(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


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

    Raises:
        ConfigError: the folder is absent or not writable.
    """
    path = Path(path)
    # Not a fixed name: two commands may write the same file at once.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError.single(str(path), "", f"cannot be written: {error.strerror}") from None


def write_json(path: str | Path, record: Record) -> None:
    """Write a typed object as JSON, atomically; the same object gives the same bytes."""
    write_text(path, dump_json(to_data(record)))
