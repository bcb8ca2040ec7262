"""Options of `eth run` that say what is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from eth_cli.errors import ConfigError
from eth_cli.launch.config import DataOptions, DataPath
from eth_cli.launch.data.vocabulary import BYTES


def data_options(
    data: Sequence[str] | None,
    *,
    tokenizer: str | None,
    text_field: str,
    ignore_borders: bool,
    cache: Path | None,
) -> DataOptions:
    """What is trained on, as it is told on the command line. Raises ConfigError."""
    if tokenizer is not None and not tokenizer.strip():
        raise ConfigError.single("--tokenizer", "", f"is empty; give a tokenizer.json or {BYTES}")
    return DataOptions(
        paths=tuple(_data_path("--data", text) for text in data or ()),
        tokenizer=tokenizer,
        text_field=text_field,
        ignore_borders=ignore_borders,
        cache=None if cache is None else str(cache),
    )


def _data_path(option: str, text: str) -> DataPath:
    """``PATH`` or ``PATH=WEIGHT``; a path that exists is one, whatever is in its name."""
    path, sign, last = text.rpartition("=")
    if not sign or Path(text).exists():
        path, sign = text, ""
    if not path.strip():
        raise ConfigError.single(option, "", "is empty; give a path")
    if not sign:
        return DataPath(path=path)
    try:
        weight = float(last)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError.single(
            option, "", f"{text!r} has the weight {last!r}; give a number above 0 after the ="
        )
    return DataPath(path=path, weight=weight)
