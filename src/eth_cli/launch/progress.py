"""How a run gets on: metrics.jsonl read while it grows, and the figures that people watch."""

from __future__ import annotations

import json
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.launch.utilisation import Utilisation

_WINDOW = 20
"""Steps that the present speed is the median of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl, which `launch.runtime.metrics` writes."""

    step: int
    loss: float | None
    """Mean over the valid tokens of the global batch; None for a skipped step."""
    tokens: int
    """Valid tokens of the global batch."""
    step_time_s: float
    grad_norm: float | None = None
    """Before clipping; None for a skipped step."""
    lr: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A run after one of its steps."""

    step: int
    steps: int
    """Steps in all."""
    loss: float | None
    """None when the step was skipped because something was not finite."""
    tokens_per_s: float
    """Over the last 20 steps."""
    step_time_s: float
    """Of this step [s]."""
    eta_s: float
    """Until the last step, at the median speed of the last 20 [s]."""
    utilisation: Utilisation = field(default_factory=Utilisation)
    """Of this step."""


class MetricsTail:
    """Reads the lines that have been added to a metrics file since it was last asked."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self._path = path
        self._position = 0
        self._last_step = after_step

    def read(self) -> list[StepRecord]:
        """The new steps. A line that is being written, or is damaged, is left out."""
        try:
            size = self._path.stat().st_size
            if size < self._position:
                self._position = 0  # rewritten: a resumed run drops lines after its checkpoint
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        complete = data.rfind(b"\n") + 1
        self._position += complete
        records = [r for line in data[:complete].splitlines() if (r := parse_step(line))]
        new = [record for record in records if record.step > self._last_step]
        if new:
            self._last_step = new[-1].step
        return new


def read_metrics(path: Path) -> tuple[StepRecord, ...]:
    """The steps of a metrics file, ascending. A last line cut short by a crash is left out.

    Raises:
        ConfigError: the file cannot be read, or a line other than the last is damaged.
    """
    lines = serde.read_text(path).splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        record = parse_step(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ConfigError.single(str(path), f"line {number}", "is not the record of a step")
    return tuple(records)


def parse_step(line: bytes | str) -> StepRecord | None:
    """The record of a line; None when it is not one."""
    try:
        data: dict[str, Any] = json.loads(line)
        return StepRecord(
            step=int(data["step"]),
            loss=_number(data, "loss"),
            tokens=int(data["tokens"]),
            step_time_s=float(data["step_time_s"]),
            grad_norm=_number(data, "grad_norm"),
            lr=_number(data, "lr"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(data: dict[str, Any], name: str) -> float | None:
    value = data.get(name)
    return None if value is None else float(value)


class Speedometer:
    """Turns steps into `Progress`."""

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._recent: deque[StepRecord] = deque(maxlen=_WINDOW)

    def progress(self, record: StepRecord, utilisation: Utilisation | None = None) -> Progress:
        """The progress after one more step."""
        self._recent.append(record)
        # The first step also allocates and connects; it says little about the next ones.
        steady = list(self._recent)[1:] if record.step == len(self._recent) > 1 else self._recent
        total_s = sum(r.step_time_s for r in steady)
        return Progress(
            step=record.step,
            steps=self._steps,
            loss=record.loss,
            tokens_per_s=sum(r.tokens for r in steady) / total_s if total_s > 0 else 0.0,
            step_time_s=record.step_time_s,
            eta_s=(self._steps - record.step) * statistics.median(r.step_time_s for r in steady),
            utilisation=utilisation or Utilisation(),
        )
