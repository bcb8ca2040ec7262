"""What is wrong with a file's data, in one wording: pydantic's errors as `Fault`s.

Each fault names the field as a person would, says what it must be and what it is, lists the valid
choices and suggests the nearest one. Reading the files themselves is `eth_cli.serde`'s part.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from eth_cli.errors import Fault

if TYPE_CHECKING:  # The command line has faults too, and need not wait for pydantic.
    from pydantic import BaseModel, ValidationError

Location = tuple[str | int, ...]
"""A place in a file's data: keys and list indices from the top."""

MAX_SHOWN = 60
"""Characters shown of a wrong value."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,80}")


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
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _PLAIN_KEY.fullmatch(part):
            text += f"[{shown(part)}]"
        else:
            text += f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A value for an error message: short, on one line, never a whole structure."""
    match value:
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case None:
            return "nothing (null)"
        case float():
            return str(value)
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def did_you_mean(wrong: str, choices: Iterable[str]) -> str:
    """`` (did you mean x?)`` for the choice nearest to a wrong word; empty where none is near."""
    close = difflib.get_close_matches(wrong, sorted(choices), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def some_of(names: Sequence[str], limit: int = 8) -> str:
    """The first names of a list for an error message."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def faults_of(
    error: ValidationError, record_type: type[BaseModel], file: str, data: Any = None
) -> list[Fault]:
    """Every fault of a failed validation of ``data``, in the order of the type's fields."""
    found: list[tuple[Location, str]] = []
    details = [(_data_location(d["loc"]), d) for d in error.errors(include_url=False)]
    misspelt = _misspelt(details, record_type)
    for location, detail in details:
        if detail["type"] == "too_short" and any(
            other[: len(location)] == location and other != location for other, _ in details
        ):
            continue  # Its entries are there, but wrong, and named by faults of their own.
        if detail["type"] == "missing" and location in misspelt:
            continue  # It is there under a name that the unknown key's fault corrects.
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            found += [((*location, *below), text) for below, text in cause.faults]
        else:
            text = _message(detail, record_type, location)
            found.append((location, text + _label(record_type, data, location)))
    return [Fault(file=file, field=format_location(at), message=text) for at, text in found]


def _data_location(location: Sequence[int | str]) -> Location:
    # Pydantic marks a fault of a mapping's key, not its value, with this last part.
    return tuple(location[:-1]) if location[-1:] == ("[key]",) else tuple(location)


def _label(record_type: type[BaseModel], data: Any, location: Location) -> str:
    """`` (device V100-16, block head)``: the entry that a place lies in, by its label keys."""
    label = ""
    for depth, part in enumerate(location):
        owner = _owner_of(record_type, location[:depth])
        keys = getattr(owner, "label_keys", ())
        if keys and isinstance(data, dict):
            said = [f"{k} {data[k]}" for k in keys if isinstance(data.get(k), str | int)]
            label = f" ({', '.join(said)})" if said else ""
        try:
            data = data[part]
        except (LookupError, TypeError):
            break
    return label


def _misspelt(
    details: Iterable[tuple[Location, Any]], record_type: type[BaseModel]
) -> set[Location]:
    """Places of the keys that unknown keys were meant to be."""
    places = set()
    for location, detail in details:
        if detail["type"] == "extra_forbidden":
            close = _nearest_key(record_type, location)
            if close is not None:
                places.add((*location[:-1], close))
    return places


def _nearest_key(record_type: type[BaseModel], location: Location) -> str | None:
    owner = _owner_of(record_type, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), _keys_of(owner), n=1) if owner else []
    return close[0] if close else None


def _message(detail: Any, record_type: type[BaseModel], location: Location) -> str:
    """What one of pydantic's errors means. Its own wording is used where that reads well."""
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    match kind:
        case "extra_forbidden":
            owner = _owner_of(record_type, location[:-1])
            hint = did_you_mean(str(location[-1]), _keys_of(owner))
            valid = f"; valid keys are {', '.join(_keys_of(owner))}" if owner else ""
            return f"unknown key{hint}{valid}"
        case "missing":
            return "is missing"
        case "missing_positional_only_argument" | "missing_argument":
            return "has too few entries"
        case "value_error":
            return str(context["error"])
        case "json_invalid":
            return f"cannot be read: {context.get('error', 'broken text')}"
        case "finite_number":
            return f"must be a finite number, not {shown(value)}"
        case "string_too_short":
            return "must not be empty"
        case "too_short":
            least, actual = context["min_length"], context["actual_length"]
            return f"must have at least {least} {_entries(least)}, not {actual}"
        case "too_long":
            most, actual = context["max_length"], context["actual_length"]
            return f"must have at most {most} {_entries(most)}, not {actual}"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters"
        case "string_pattern_mismatch":
            return (
                f"{shown(value)} is not a name; use letters, digits, '.', '_' and '-', "
                "a letter or digit first"
            )
    words = {
        "string_type": "must be a text",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "int_parsing_size": "must be a smaller whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "tuple_type": "must be a list",
        "list_type": "must be a list",
        "model_type": "must be a mapping of keys to values",
        "model_attributes_type": "must be a mapping of keys to values",
        "dict_type": "must be a mapping of keys to values",
    }
    said = words.get(kind) or "must be " + detail["msg"].removeprefix("Input should be ")
    quotes = (
        "; put it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    )
    return f"{said}, not {shown(value)}{quotes}"


def _entries(number: int) -> str:
    return "entry" if number == 1 else "entries"


def _keys_of(owner: type[BaseModel] | None) -> list[str]:
    return [] if owner is None else [f.alias or name for name, f in owner.model_fields.items()]


def _owner_of(
    record_type: type[BaseModel], location: Iterable[int | str]
) -> type[BaseModel] | None:
    """The record type that stands at a place, found by following the annotations."""
    current: Any = record_type
    for part in location:
        if isinstance(part, str) and _is_record(current):
            fields = {f.alias or n: f.annotation for n, f in current.model_fields.items()}
            current = _without_none(fields.get(part))
        else:
            arguments = typing.get_args(_without_none(current))
            current = next((a for a in reversed(arguments) if a is not Ellipsis), None)
    current = _without_none(current)
    return current if _is_record(current) else None


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return members[0] if members else None
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation


def _is_record(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    from pydantic import BaseModel

    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
