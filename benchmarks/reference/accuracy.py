"""Predicts the reference's measured runs and tables the errors.

python -m benchmarks.reference.accuracy [--reference FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reference.cases import imported
from benchmarks.reference.tables import DEFAULT_PATH, Reference
from eth_cli.errors import EthError
from eth_cli.search.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- table begin -->\n", "<!-- table end -->\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured run and what is predicted for it."""

    name: str
    group: str
    shape: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    clean_time: bool
    clean_memory: bool

    @property
    def time_error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak memory, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def predict(reference: Reference) -> tuple[list[Row], list[str]]:
    """All measured runs, and why some cannot be predicted."""
    rows, left_out = [], []
    for case in reference.measured["cases"]:
        try:
            ours = imported(reference, case)
        except ValueError as error:
            left_out.append(f"{case['id']}: {error}")
            continue
        simulation = simulate(ours.plan, ours.profile, ours.cluster, overlap=False)
        rows.append(_row(case, simulation.step_time_s, max(m.bytes for m in simulation.memory)))
    return rows, left_out


def _row(case: Any, step_time_s: float, num_bytes: int) -> Row:
    return Row(
        name=case["id"],
        group="GH200" if "GH-96" in case["gpus"] else "RTX",
        shape=f"{case['num_gpus']} GPUs, dp {case['dp']}, pp {case['pp']}, tp {case['tp']}, "
        f"{case['micro_batch_size']} x {case['micro_batches_per_pipeline']:.0f}",
        predicted_s=step_time_s,
        measured_s=case["measured"]["iteration_time_s"],
        predicted_bytes=num_bytes,
        measured_bytes=case["measured"]["peak_gpu_memory_bytes"],
        clean_time=case["clean_time"],
        clean_memory=case["clean_memory"],
    )


def mean_errors(rows: list[Row]) -> dict[str, float]:
    """Mean absolute errors over clean cases, by group."""
    groups = {
        "step time, GH200": [r.time_error for r in rows if r.group == "GH200" and r.clean_time],
        "step time, mixed RTX": [r.time_error for r in rows if r.group == "RTX" and r.clean_time],
        "peak memory": [r.memory_error for r in rows if r.clean_memory],
    }
    return {k: statistics.fmean(abs(e) for e in v) for k, v in groups.items() if v}


def table(rows: list[Row], left_out: list[str]) -> str:
    """The errors as Markdown; figures in brackets are of cases that the reference doubts."""
    lines = [
        "| case | shape (micro-batch size x number) | step time predicted | measured | error "
        "| peak memory predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        time = f"{r.time_error:+.1%}" if r.clean_time else f"({r.time_error:+.1%})"
        memory = f"{r.memory_error:+.1%}" if r.clean_memory else f"({r.memory_error:+.1%})"
        lines.append(
            f"| {r.name.replace('clariden__', '')} | {r.shape} | {r.predicted_s:.3f} s "
            f"| {r.measured_s:.3f} s | {time} | {r.predicted_bytes / 1e9:.2f} GB "
            f"| {r.measured_bytes / 1e9:.2f} GB | {memory} |"
        )
    lines += ["", *(f"Not predicted: {why}." for why in left_out), ""]
    lines += ["| mean absolute error over clean cases | |", "|---|---|"]
    lines += [f"| {name} | {error:.1%} |" for name, error in mean_errors(rows).items()]
    return "\n".join(lines) + "\n"


def replace_table(document: Path, text: str) -> None:
    """Put a table between the marks of a document."""
    before, rest = document.read_text().split(BEGIN)
    document.write_text(before + BEGIN + text + END + rest.split(END)[1])


def main() -> int:
    """Predict, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--write", action="store_true", help="into docs/accuracy.md")
    options = parser.parse_args()
    try:
        text = table(*predict(Reference(options.reference)))
    except EthError as error:
        print(error, file=sys.stderr)
        return 2
    print(text, end="")
    if options.write:
        replace_table(DOCUMENT, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
