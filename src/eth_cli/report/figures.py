"""What a report says: records of figures, all but the spans plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from eth_cli.events import Span
from eth_cli.launch.progress import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """One part of the step time."""

    name: str
    predicted_s: float | None
    """None without a prediction."""
    measured_s: float
    """Median over the steps that count [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShares:
    """What a stage does with the step, as parts of the step time; they sum to one."""

    compute: float
    """Forwards and backwards."""
    bubble: float
    """Waiting for its neighbours: neither, from the step's first forward until the last backward of
    its pipeline."""
    sync: float
    """From then until its update: for slower pipelines, and for gradient sync that nothing hides.
    """
    optimizer: float
    """Its update."""
    other: float
    """The rest: data, logging, and waiting for the update of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """One stage; times are of one micro-batch, measured ones medians."""

    pipeline: int
    stage: int
    devices: tuple[str, ...]
    blocks: tuple[int, int]
    predicted_forward_s: float | None
    measured_forward_s: float
    predicted_backward_s: float | None
    measured_backward_s: float
    predicted_busy_share: float | None
    """Part of the step time that the stage computes; None where its times are not predicted."""
    measured_busy_share: float
    predicted_shares: StepShares | None
    """None without a profile."""
    measured_shares: StepShares


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The stage that computes the longest part of the step: what the plan can be no faster than."""

    pipeline: int
    stage: int
    cause: Literal["compute", "bubble", "sync", "other"]
    """What it spends most of the step on."""
    compute_over_predicted: float | None
    """Its measured over its predicted compute, less one; None where that is not predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak memory of one rank."""

    rank: int
    device: str
    pipeline: int
    stage: int
    predicted_bytes: int | None
    """None without a prediction."""
    capacity_bytes: int | None
    """Of its device; None where the plan carries no cluster."""
    measured_bytes: int | None
    """Allocated on a GPU, resident of a CPU process; None before the rank told it."""
    is_emulated: bool
    """Whether a CPU process plays the device: then measured memory is Python's and torch's too,
    and says nothing about the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run, predicted against measured."""

    run_dir: Path
    model: str
    source: str | None
    """Where the prediction comes from; None when the run folder holds none."""
    num_steps: int
    """Steps that count for the measured figures."""
    num_dropped: int
    """Steps at the start that do not: they also allocate memory and connect."""
    predicted_step_time_s: float | None
    measured_step_time_s: float
    """Median [s]."""
    measured_spread_s: float
    """Interquartile range of the step time [s]."""
    predicted_tokens_per_s: float | None
    measured_tokens_per_s: float
    """Tokens of the global batch, ignored ones included, over the median step time."""
    terms: tuple[TermReport, ...]
    """They sum to the step time."""
    exposed_sync: TermReport
    """Gradient sync that no computation hides: one of the terms."""
    stages: tuple[StageReport, ...]
    slowest: Slowest
    memory: tuple[RankMemory, ...]
    """Of every rank."""
    first_loss: float | None
    last_loss: float | None
    notes: tuple[str, ...]
    """What a reader should know before trusting the figures."""
    typical_step: int
    """The step whose time is nearest to the median, and whose spans are kept."""
    records: tuple[StepRecord, ...]
    """Every step of metrics.jsonl that all ranks finished."""
    predicted_spans: tuple[Span, ...]
    """From 0; empty without a profile."""
    measured_spans: tuple[Span, ...]
    """Of the typical step, from 0."""

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less one; None without a prediction."""
        if self.predicted_step_time_s is None:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    def as_data(self) -> dict[str, Any]:
        """Everything but steps and spans as plain JSON data."""
        left_out = ("records", "predicted_spans", "measured_spans")
        data = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {k: v for k, v in data.items() if k not in left_out} | {
            "run_dir": str(self.run_dir),
            "error": self.error,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
