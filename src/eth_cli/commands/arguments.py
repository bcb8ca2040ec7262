"""Values of command-line options: parsing with one clear line when they are wrong.

Each parser is made for an option's name, so that its error says which option it is about. Ranges
are checked here, in one wording with both numbers, and not by the command-line library, whose
wording changes between its versions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eth_cli import units
from eth_cli.errors import ConfigError
from eth_cli.faults import did_you_mean

LARGEST = 10**9
"""No count on the command line may be larger."""


def whole_number(option: str, *, least: int = 1, most: int = LARGEST) -> Callable[[str | int], int]:
    """A parser of whole numbers in ``[least, most]``; its errors are ConfigError."""

    def parse(text: str | int) -> int:
        shown = str(text).strip()
        digits = shown.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
            raise ConfigError.single(option, "", f"{shown[:40]!r} is not a whole number")
        number = int(shown)
        if number < least:
            raise ConfigError.single(option, "", f"{number} is too small; the least is {least}")
        if number > most:
            raise ConfigError.single(option, "", f"{number} is too large; the most is {most}")
        return number

    return parse


def whole_numbers(option: str, *, least: int = 1) -> Callable[[str], tuple[int, ...]]:
    """A parser of ``1,2,4``: different whole numbers, sorted."""
    parse_one = whole_number(option, least=least)

    def parse(text: str) -> tuple[int, ...]:
        numbers = [parse_one(part) for part in str(text).split(",")]
        if len(set(numbers)) != len(numbers):
            raise ConfigError.single(option, "", f"{text!r} names a number twice")
        return tuple(sorted(numbers))

    return parse


def real_number(option: str, *, above: float = 0.0) -> Callable[[str | float], float]:
    """A parser of finite numbers greater than ``above``."""

    def parse(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ConfigError.single(option, "", f"{str(text)[:40]!r} is not a number") from None
        if not math.isfinite(number) or number <= above:
            raise ConfigError.single(option, "", f"{text} must be finite and above {above:g}")
        return number

    return parse


def fraction(option: str) -> Callable[[str | float], float]:
    """A parser of parts of a whole, as ``0.05`` or ``5%``, in [0, 1]."""

    def parse(text: str | float) -> float:
        shown = str(text).strip()
        try:
            number = float(shown.removesuffix("%")) / (100 if shown.endswith("%") else 1)
        except ValueError:
            raise ConfigError.single(
                option, "", f"{shown[:40]!r} is not a number; write it like 0.05 or 5%"
            ) from None
        if not 0 <= number <= 1:
            raise ConfigError.single(
                option, "", f"{shown} must be from 0 to 1; write it like 0.05 or 5%"
            )
        return number

    return parse


def duration(option: str) -> Callable[[str | float], float]:
    """A parser of times above 0 with their unit, such as ``10s`` or ``250ms`` [s]."""

    def parse(text: str | float) -> float:
        try:
            time_s = units.parse_seconds(str(text))
        except ValueError as error:
            raise ConfigError.single(option, "", str(error)) from None
        if time_s <= 0:
            raise ConfigError.single(option, "", f"{text} must be above 0")
        return time_s

    return parse


def size(option: str) -> Callable[[str | int], int]:
    """A parser of sizes above 0 with their unit, such as ``64MiB`` [bytes]."""

    def parse(text: str | int) -> int:
        try:
            num_bytes = text if isinstance(text, int) else units.parse_bytes(text)
        except ValueError as error:
            raise ConfigError.single(option, "", str(error)) from None
        if num_bytes <= 0:
            raise ConfigError.single(option, "", f"{text} must be above 0")
        return num_bytes

    return parse


_CHANGE = re.compile(r"([+-])(\d{1,9})x([A-Za-z0-9][A-Za-z0-9._-]*)")


def changes(option: str) -> Callable[[str], tuple[tuple[int, str], ...]]:
    """A parser of ``+4xL4,-2xV100-16``: numbers of devices that are added or taken away."""

    def parse(text: str) -> tuple[tuple[int, str], ...]:
        found = []
        for part in str(text).split(","):
            match = _CHANGE.fullmatch(part.strip())
            if match is None or int(match[2]) == 0:
                raise ConfigError.single(
                    option,
                    "",
                    f"{part[:60]!r} is no change; write it like +4xL4, -2xV100-16 or -1xNODE",
                )
            found.append((int(match[1] + match[2]), match[3]))
        return tuple(found)

    return parse


def choice(option: str, choices: Sequence[str]) -> Callable[[str], str]:
    """A parser that takes one of ``choices`` only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ConfigError.single(
                option,
                "",
                f"{text!r} is not one of {', '.join(choices)}{did_you_mean(text, choices)}",
            )
        return text

    return parse


def path(option: str) -> Callable[[str | Path], Path]:
    """A parser of paths: any text but an empty one, which would mean the current folder."""

    def parse(text: str | Path) -> Path:
        if not str(text).strip():
            raise ConfigError.single(option, "", "is empty; give a path")
        return Path(text)

    return parse


def output_file(option: str, path: Path, *, inputs: Iterable[Path | None] = ()) -> Path:
    """Check that a result can be written there, before the work that makes it starts.

    Args:
        inputs: files that the command reads, which the result must not replace.

    Raises:
        ConfigError: its folder is absent or closed to us, the path is a folder itself, its name is
            one that the system refuses, or it is an input.
    """
    try:
        is_there = path.exists()
        same = is_there and any(i and i.exists() and path.samefile(i) for i in inputs)
    except OSError as error:
        raise ConfigError.single(option, "", f"{path}: {error.strerror}") from None
    if same and path.is_file():
        raise ConfigError.single(
            option, "", f"{path} is read by this command too; give another file"
        )
    if path.is_dir():
        raise ConfigError.single(option, "", f"{path} is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():  # A device or a pipe, which is written to as it is.
        if not os.access(path, os.W_OK):
            raise ConfigError.single(option, "", f"{path} cannot be written by this user")
        return path
    # A link stays, and the file that it leads to is written.
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if folder.exists() and not folder.is_dir():
        raise ConfigError.single(option, "", f"{folder} is a file, not a folder")
    if not folder.is_dir():
        raise ConfigError.single(option, "", f"the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError.single(
            option, "", f"{path} cannot be written: the folder {folder} is read-only for this user"
        )
    return path


def input_folder(path: Path) -> Path:
    """Check that what should be a folder is no file, which "no such folder" would not tell.

    Raises:
        ConfigError: it is a file.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError.single(str(path), "", "is a file, not a run folder")
    return path
