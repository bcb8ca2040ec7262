"""A run's report and a comparison of two as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from eth_cli.comparison import Comparison
from eth_cli.render.plan import TERM_WORDS
from eth_cli.render.tables import join_devices, new_table, titled
from eth_cli.report import Report
from eth_cli.units import format_bytes, format_seconds

NOTHING = "-"
_NOTABLE = 0.05
"""Part of the step from which an error is shown: one in percent of next to nothing says nothing."""


def report_view(report: Report) -> Iterator[RenderableType]:
    """The step time term by term, then stage by stage."""
    yield titled(
        f"{report.model}, step time, median of {report.num_steps} steps"
        + (f", prediction: {report.source}" if report.source else ""),
        _term_table(report),
    )
    if report.error is not None:
        yield Text(
            "error: predicted over measured, less one; shown for parts of at least "
            f"{100 * _NOTABLE:.0f} % of the step",
            style="dim",
        )
    yield titled("stages, one micro-batch: predicted / measured", _stage_table(report))
    yield titled("what stages do with the step: predicted / measured", _share_table(report))
    yield slowest_line(report)
    yield titled("peak memory", _memory_table(report))
    if report.first_loss is not None and report.last_loss is not None:
        yield Text(f"loss {report.first_loss:.4f} -> {report.last_loss:.4f}")
    for note in report.notes:
        yield Text(f"note: {note}", style="yellow")


def comparison_view(comparison: Comparison) -> Iterator[RenderableType]:
    """Both runs' speeds, then the speed-up in one line."""
    run, baseline = comparison.run, comparison.baseline
    table = new_table(
        left=("run",),
        right=("predicted step", "measured step", "error", "tokens/s", "first loss", "last loss"),
        droppable=("first loss", "last loss", "error"),
    )
    for report in (baseline, run):
        table.add_row(
            report.run_dir.name,
            _seconds(report.predicted_step_time_s),
            format_seconds(report.measured_step_time_s),
            _error(report.predicted_step_time_s, report.measured_step_time_s),
            f"{report.measured_tokens_per_s:,.0f}",
            _loss(report.first_loss),
            _loss(report.last_loss),
        )
    title = f"{run.model}: {run.run_dir.name} against {baseline.run_dir.name}"
    yield titled(title, table)
    predicted = comparison.predicted_speed_up
    yield Text(
        f"{run.run_dir.name} is {comparison.measured_speed_up:.2f} x as fast as "
        f"{baseline.run_dir.name}, measured"
        + (f" ({predicted:.2f} x predicted)" if predicted is not None else "")
        + f"; loss {_loss(run.first_loss)} -> {_loss(run.last_loss)}",
        style="bold",
    )


def _term_table(report: Report) -> Table:
    table = new_table(
        left=("part",),
        right=("predicted", "measured", "error"),
    )
    for term in report.terms:
        larger_s = max(term.predicted_s or 0.0, term.measured_s)
        table.add_row(
            TERM_WORDS.get(term.name, "everything else"),
            _seconds(term.predicted_s),
            format_seconds(term.measured_s),
            _error(term.predicted_s, term.measured_s)
            if larger_s >= _NOTABLE * report.measured_step_time_s
            else NOTHING,
        )
    table.add_section()
    table.add_row(
        "step",
        _seconds(report.predicted_step_time_s),
        f"{format_seconds(report.measured_step_time_s)}",
        _error(report.predicted_step_time_s, report.measured_step_time_s),
    )
    return table


def _stage_table(report: Report) -> Table:
    table = new_table(
        left=("pipeline", "stage", "device"),
        right=("blocks", "forward", "backward", "busy"),
        droppable=("blocks",),
    )
    previous = 0
    for stage in report.stages:
        if stage.pipeline != previous:
            table.add_section()
        previous = stage.pipeline
        start, stop = stage.blocks
        table.add_row(
            str(stage.pipeline),
            str(stage.stage),
            join_devices(stage.devices),
            f"[{start}, {stop})",
            f"{_seconds(stage.predicted_forward_s)} / {format_seconds(stage.measured_forward_s)}",
            f"{_seconds(stage.predicted_backward_s)} / {format_seconds(stage.measured_backward_s)}",
            f"{_percent(stage.predicted_busy_share)} / {_percent(stage.measured_busy_share)}",
        )
    return table


def _share_table(report: Report) -> Table:
    table = new_table(
        left=("pipeline", "stage", "device"),
        right=("compute", "bubble", "sync", "optimizer", "other"),
        droppable=("other", "optimizer"),
    )
    previous = 0
    for stage in report.stages:
        if stage.pipeline != previous:
            table.add_section()
        previous = stage.pipeline
        predicted, measured = stage.predicted_shares, stage.measured_shares
        table.add_row(
            str(stage.pipeline),
            str(stage.stage),
            join_devices(stage.devices),
            *(
                f"{_percent(None if predicted is None else getattr(predicted, name))} / "
                f"{_percent(getattr(measured, name))}"
                for name in ("compute", "bubble", "sync", "optimizer", "other")
            ),
        )
    return table


CAUSES = {
    "compute": "limited by its computing",
    "bubble": "limited by waiting for its neighbours",
    "sync": "limited by waiting for gradients and for slower pipelines",
    "other": "limited by what is neither computing nor waiting",
}
"""What a slowest stage spends most of the step on."""


def slowest_line(report: Report) -> Text:
    """Which stage is the slowest, and why."""
    slowest = report.slowest
    stage = next(
        s for s in report.stages if (s.pipeline, s.stage) == (slowest.pipeline, slowest.stage)
    )
    shares = stage.measured_shares
    line = (
        f"slowest: stage {stage.stage} of pipeline {stage.pipeline} "
        f"({join_devices(stage.devices)}), {CAUSES[slowest.cause]}: computes "
        f"{_percent(shares.compute)} of the step, waits {_percent(shares.bubble + shares.sync)}"
    )
    over = slowest.compute_over_predicted
    if over is not None:
        line += f"; its computing takes {100 * abs(over):.1f} % "
        line += "longer than predicted" if over >= 0 else "less than predicted"
    return Text(line)


def _memory_table(report: Report) -> Table:
    table = new_table(
        left=("rank", "device"),
        right=("pipeline", "stage", "predicted", "measured", "capacity"),
        droppable=("pipeline", "stage"),
    )
    for memory in report.memory:
        table.add_row(
            str(memory.rank),
            memory.device,
            str(memory.pipeline),
            str(memory.stage),
            _bytes(memory.predicted_bytes),
            _bytes(memory.measured_bytes),
            _bytes(memory.capacity_bytes),
        )
    return table


def _bytes(value: int | None) -> str:
    return NOTHING if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else format_seconds(value)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{round(100 * share)} %"


def _loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _error(predicted: float | None, measured: float) -> str:
    """Predicted over measured, less one."""
    if predicted is None or measured <= 0:
        return NOTHING
    return f"{100 * (predicted / measured - 1):+.1f} %"
