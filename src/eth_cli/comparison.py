"""Two runs side by side: how much faster one is than the other, measured and predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eth_cli.errors import ConfigError
from eth_cli.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run against a baseline. Speeds are of tokens, so that global batches may differ."""

    run: Report
    baseline: Report

    @property
    def measured_speed_up(self) -> float:
        """Measured tokens per second over the baseline's."""
        return self.run.measured_tokens_per_s / self.baseline.measured_tokens_per_s

    @property
    def predicted_speed_up(self) -> float | None:
        """Predicted tokens per second over the baseline's; None where one has no prediction."""
        ours, theirs = self.run.predicted_tokens_per_s, self.baseline.predicted_tokens_per_s
        return None if ours is None or theirs is None else ours / theirs

    def as_data(self) -> dict[str, Any]:
        """Everything as plain JSON data."""
        return {
            "run": self.run.as_data(),
            "baseline": self.baseline.as_data(),
            "measured_speed_up": self.measured_speed_up,
            "predicted_speed_up": self.predicted_speed_up,
        }


def compare(run: Report, baseline: Report) -> Comparison:
    """A run against a baseline.

    Raises:
        ConfigError: they trained different models, so that their speeds say nothing.
    """
    if run.model != baseline.model:
        raise ConfigError.single(
            "--against",
            "",
            f"{baseline.run_dir} trained {baseline.model}, but {run.run_dir} trained {run.model}; "
            "compare runs of one model",
        )
    return Comparison(run=run, baseline=baseline)
