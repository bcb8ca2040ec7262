"""What is logged a line a step: metrics.jsonl and samples/rank-N.jsonl. Owns these formats.

A line of metrics.jsonl, written by one rank: step (from 1), loss (mean over all valid tokens of the
global batch, before the update), grad_norm (before clipping), lr, tokens (valid ones of the global
batch), step_time_s (wall time of the step on the reporting rank, which waits for all others), and
``skipped: true`` on a step whose loss or gradients were not finite; loss and grad_norm are then
absent. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eth_cli.launch.config import RunFolder
from eth_cli.plan import Plan


def reporting_rank(plan: Plan) -> int:
    """The rank that writes metrics: the last stage of the first pipeline."""
    return plan.ranks_of(0, len(plan.pipelines[0].stages) - 1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What one optimizer step came to; the same on every rank but for the time."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    skipped: bool
    """Whether the update was left out because loss or gradients were not finite."""

    def to_json(self) -> str:
        """One line of metrics.jsonl."""
        data: dict[str, Any] = {"step": self.step}
        if not self.skipped:
            data |= {"loss": self.loss, "grad_norm": self.grad_norm}
        data |= {"lr": self.lr, "tokens": self.tokens, "step_time_s": self.step_time_s}
        if self.skipped:
            data["skipped"] = True
        return json.dumps(data, separators=(",", ":"))


def sample_line(step: int, samples: Sequence[int]) -> str:
    """One line of samples/rank-N.jsonl: what a pipeline trained on in a step."""
    return json.dumps({"step": step, "samples": list(samples)}, separators=(",", ":"))


class RunLogs:
    """The logs of one rank: files of JSON lines, appended to and flushed line by line."""

    def __init__(self, *, metrics: Path | None, samples: Path | None) -> None:
        """None for what this rank does not log."""
        self._metrics = _append_to(metrics)
        self._samples = _append_to(samples)

    def write(self, metrics: StepMetrics, samples: Sequence[int]) -> None:
        """Append a step; it can be read at once."""
        if self._metrics is not None:
            self._metrics.write(metrics.to_json() + "\n")
            self._metrics.flush()
        if self._samples is not None:
            self._samples.write(sample_line(metrics.step, samples) + "\n")
            self._samples.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()


def _append_to(path: Path | None) -> IO[str] | None:
    return None if path is None else open(path, "a", encoding="utf-8")


def continue_logs(folder: RunFolder, step: int) -> None:
    """Make a run folder's logs, of all ranks, those of a run that has just done ``step``.

    Lines of later steps, which a run that was killed left, would otherwise stand there twice.
    """
    for logs in (folder.events, folder.samples):
        logs.mkdir(parents=True, exist_ok=True)
        for path in logs.glob("rank-*.jsonl"):
            keep_until(path, step)
    keep_until(folder.metrics, step)


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step`` from a file of JSON lines, atomically."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, step)]
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(aside, path)


def _is_kept(line: str, step: int) -> bool:
    try:
        data = json.loads(line)
    except ValueError:
        return False  # cut short when the run was killed
    return isinstance(data, dict) and int(data.get("step") or 0) <= step
