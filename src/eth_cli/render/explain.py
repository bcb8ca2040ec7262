"""An explanation in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from eth_cli.render.plan import TERM_WORDS
from eth_cli.render.tables import join_devices, new_table, percent, titled
from eth_cli.search.explain import ClusterChange, Explanation, MemoryDecision, StageChange
from eth_cli.units import format_bytes, format_seconds

MEMORY_WORDS = {
    "parameters": "parameters",
    "activations": "activations",
    "recompute": "recomputing",
    "boundary": "boundary",
    "logits": "logits",
    "buckets": "sync buckets",
    "process": "process",
}
"""Names of the memory's terms for people; another term is shown by its own name."""

PROCESS_NOTE = (
    "process: what each process takes before it holds a block, communication buckets included"
)


def explanation_view(explanation: Explanation) -> Iterator[RenderableType]:
    """Everything, section by section."""
    yield Text("")
    yield Text("why the step takes as long as it does", style="bold")
    yield from _limit_lines(explanation)
    yield titled("what each part of the step costs", _term_table(explanation))
    yield titled("what is in the memory of each device", _memory_table(explanation))
    yield Text(PROCESS_NOTE)
    yield Text("")
    yield Text("what memory decides", style="bold")
    for decision in explanation.memory_decisions:
        yield Text(_decision_words(decision, explanation.step_time_s))
    yield Text("")
    yield Text("what is not used", style="bold")
    yield from _unused_lines(explanation)
    if explanation.baselines:
        yield Text("")
        yield Text("how far the baselines are", style="bold")
        yield from _baseline_lines(explanation)
    yield titled("\nwhat would help", _change_table(explanation))
    yield Text(_best_words(explanation.best_change))


def _limit_lines(explanation: Explanation) -> Iterator[Text]:
    limit = explanation.limit
    last = limit.blocks[1] - 1
    blocks = f"block {last}" if last == limit.blocks[0] else f"blocks {limit.blocks[0]} to {last}"
    pace_s = limit.forward_s + limit.backward_s
    yield Text(
        f"pipeline {limit.pipeline} ends last; in it stage {limit.stage} ({blocks} on "
        f"{join_devices(limit.devices)}, {limit.device_type}) limits: {limit.micro_batches} "
        f"micro-batches x {format_seconds(pace_s)} = {format_seconds(limit.busy_s)}, "
        f"{percent(limit.busy_s, limit.step_time_s)} of the step"
    )
    bubble = explanation.terms.get("bubble_s", 0.0)
    yield Text(
        f"it is idle for {format_seconds(limit.idle_s)}, "
        f"{percent(limit.idle_s, limit.step_time_s)}: of that "
        f"{format_seconds(bubble)} while the pipeline fills and drains"
    )


def _term_table(explanation: Explanation) -> Table:
    table = new_table(left=("part",), right=("time", "of the step"))
    for name, time_s in explanation.terms.items():
        table.add_row(
            TERM_WORDS.get(name, name),
            format_seconds(time_s),
            f"{100 * time_s / explanation.step_time_s:.1f} %",
        )
    return table


def _memory_table(explanation: Explanation) -> Table:
    names = [
        name
        for name in explanation.memory[0].terms
        if name == "process" or any(stage.terms[name] for stage in explanation.memory)
    ]
    table = new_table(
        left=("pipeline", "stage", "device", "type"),
        right=("in flight", *(MEMORY_WORDS.get(name, name) for name in names), "in all", "full"),
        droppable=("in flight", "type"),
    )
    for i, stage in enumerate(explanation.memory):
        is_first = i == 0 or explanation.memory[i - 1].pipeline != stage.pipeline
        table.add_row(
            str(stage.pipeline) if is_first else "",
            str(stage.stage),
            join_devices(stage.devices, limit=3),
            stage.device_type,
            str(stage.num_in_flight),
            *(format_bytes(stage.terms[name]) for name in names),
            format_bytes(stage.total_bytes),
            percent(stage.total_bytes, stage.capacity_bytes),
        )
    return table


def _decision_words(decision: MemoryDecision, step_time_s: float) -> str:
    name = decision.device_type
    if not decision.gain:
        return f"{name}: nothing; with twice the memory no faster plan is found"
    words = (
        f"{name}: with twice the memory a step would take {format_seconds(decision.step_time_s)} "
        f"in place of {format_seconds(step_time_s)} ({100 * decision.gain:.1f} % less)"
    )
    if decision.pipelines != decision.pipelines_then:
        words += f", on {decision.pipelines_then} pipelines in place of {decision.pipelines}"
    said = [_stage_words(stage) for stage in decision.stages[:_MOST_STAGES]]
    left_out = len(decision.stages) - len(said)
    if said:
        words += ": " + ", ".join(said) + (f" and {left_out} more" if left_out else "")
    return words


_MOST_STAGES = 6
"""Stages that are told of for each type."""


def _stage_words(stage: StageChange) -> str:
    words = [f"{stage.blocks_then} blocks, not {stage.blocks}"]
    if stage.blocks == stage.blocks_then:
        words = [f"{stage.blocks} blocks"]
    if stage.recompute != stage.recompute_then:
        words.append("recomputing" if stage.recompute_then else "without recomputing")
    return f"{stage.device} {' '.join(words)}"


def _unused_lines(explanation: Explanation) -> Iterator[Text]:
    for reason, devices in explanation.unused.items():
        yield Text(f"{join_devices(devices)}: {reason}")
    if not explanation.unused:
        yield Text("nothing: every device has a stage")


def _baseline_lines(explanation: Explanation) -> Iterator[Text]:
    for rival in explanation.baselines:
        if rival.step_time_s is None:
            yield Text(f"{rival.name}: no plan ({rival.note})")
            continue
        ratio = rival.step_time_s / explanation.step_time_s
        note = f" ({rival.note})" if rival.note else ""
        yield Text(
            f"{rival.name}: {format_seconds(rival.step_time_s)}, {ratio:.2f} x this plan's "
            f"{format_seconds(explanation.step_time_s)}{note}"
        )


def _change_table(explanation: Explanation) -> Table:
    table = new_table(left=("change",), right=("step", "less"))
    for change in explanation.changes:
        table.add_row(
            change.words,
            "-" if change.step_time_s is None else format_seconds(change.step_time_s),
            f"{100 * change.gain:.1f} %" if change.gain else "no gain",
        )
    return table


def _best_words(change: ClusterChange | None) -> str:
    if change is None or change.step_time_s is None:
        return "none of these changes alone makes the step faster"
    return (
        f"most would help: {change.words}, with which a step takes "
        f"{format_seconds(change.step_time_s)} ({100 * change.gain:.1f} % less)"
    )


def explanation_data(explanation: Explanation) -> dict[str, Any]:
    """The same as plain JSON data."""
    data = asdict(explanation)
    for decision, made in zip(data["memory_decisions"], explanation.memory_decisions, strict=True):
        decision["stages"] = [stage._asdict() for stage in made.stages]
    best = explanation.best_change
    return data | {"best_change": None if best is None else asdict(best)}
