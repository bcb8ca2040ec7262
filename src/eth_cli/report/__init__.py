"""Predicted against measured: where a run's step time and memory went, stage by stage.

Reads a run folder and changes nothing. Measured terms are defined as the predicted ones are
(`search.cost.CostTerms`), from the spans that workers wrote; `measured.measure_step` says how.
"""

from eth_cli.report.build import build_report
from eth_cli.report.figures import (
    RankMemory,
    Report,
    Slowest,
    StageReport,
    StepShares,
    TermReport,
)
from eth_cli.report.measured import measure_step

__all__ = [
    "RankMemory",
    "Report",
    "Slowest",
    "StageReport",
    "StepShares",
    "TermReport",
    "build_report",
    "measure_step",
]
