"""A plan as tables: who holds what, how busy and how full each device is, what limits the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan, SolverInfo, UnusedDevice
from eth_cli.render.tables import join_devices, new_table, percent, titled
from eth_cli.search.answer import SearchReport
from eth_cli.search.simulate import Simulation, StageFigures
from eth_cli.units import format_bytes, format_seconds

TERM_WORDS = {
    "compute_s": "compute",
    "bubble_s": "pipeline fill and drain",
    "p2p_s": "transfers between stages",
    "gradsync_s": "gradient sync not hidden",
    "optimizer_s": "optimizer",
}
"""Names of the step time's terms for people."""


def plan_view(
    plan: Plan, simulation: Simulation, cluster: Cluster, *, title: str
) -> Iterator[RenderableType]:
    """A plan's stages, its step time and what limits it."""
    yield titled(title, stage_table(plan, simulation, cluster))
    yield step_line(plan, simulation)
    yield _limit_line(plan, simulation)


def search_view(report: SearchReport) -> Iterator[RenderableType]:
    """How good a found plan is, and what it leaves out."""
    plan = report.plan
    if plan.solver is not None:
        yield from _solver_lines(plan.solver)
    yield from _unused_lines(plan.unused_devices)
    yield Text(f"searched for {report.wall_s:.2f} s")


def stage_table(plan: Plan, simulation: Simulation, cluster: Cluster) -> Table:
    """One row a stage; pipelines that differ in nothing but their devices share their rows."""
    table = new_table(
        left=("pipeline", "share", "stage", "device", "type"),
        right=("blocks", "forward", "backward", "busy", "memory"),
        last=("",),
        droppable=("backward", "forward", "type", "busy", "memory"),
    )
    figures_of = {(f.pipeline, f.stage): f for f in simulation.stages}
    limiting = _limiting_stage(simulation)
    for members in _alike(plan, cluster):
        first = members[0]
        pipeline = plan.pipelines[first]
        for s, stage in enumerate(pipeline.stages):
            figures = [figures_of[i, s] for i in members]
            devices = [d for i in members for d in plan.pipelines[i].stages[s].devices]
            start, stop = stage.blocks
            needed, capacity = figures[0].memory.total_bytes, figures[0].capacity_bytes
            notes = [
                *(["limit"] if limiting in figures else []),
                *(["recomputes"] if stage.recompute else []),
                *(["DOES NOT FIT"] if needed > capacity else []),
            ]
            table.add_row(
                _numbers(members) if s == 0 else "",
                f"{pipeline.micro_batches} x {pipeline.micro_batch_size}" if s == 0 else "",
                str(s),
                join_devices(devices, limit=3),
                cluster.devices[stage.devices[0]].type,
                f"[{start}, {stop})",
                format_seconds(figures[0].forward_s),
                format_seconds(figures[0].backward_s),
                f"{100 * figures[0].busy_share:.0f} %",
                f"{percent(needed, capacity)} of {format_bytes(capacity)}",
                ", ".join(notes),
            )
        table.add_section()
    return table


def _alike(plan: Plan, cluster: Cluster) -> list[list[int]]:
    """Pipelines by what they are, apart from which devices of a type they have."""
    groups: dict[object, list[int]] = {}
    for i, pipeline in enumerate(plan.pipelines):
        stages = tuple(
            (s.blocks, s.recompute, tuple(cluster.devices[d].type for d in s.devices))
            for s in pipeline.stages
        )
        key = (pipeline.micro_batches, pipeline.micro_batch_size, stages)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _numbers(numbers: list[int]) -> str:
    """``3``, ``0-5`` or ``0, 2, 7 ...``."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(str(number) for number in numbers[:3])
    return shown + (" ..." if len(numbers) > 3 else "")


def step_line(plan: Plan, simulation: Simulation) -> Text:
    """The step time and its parts."""
    parts = " + ".join(
        f"{TERM_WORDS.get(name, name)} {format_seconds(value)}"
        for name, value in simulation.terms.items()
        if value >= 0.0005 * simulation.step_time_s
    )
    return Text(
        f"step {format_seconds(simulation.step_time_s)} "
        f"({plan.global_batch_size / simulation.step_time_s:,.1f} samples/s, "
        f"{simulation.tokens_per_s:,.0f} tokens/s) = {parts}"
    )


def _limiting_stage(simulation: Simulation) -> StageFigures:
    """The busiest stage of the pipeline that ends last."""
    critical = [f for f in simulation.stages if f.pipeline == simulation.critical_pipeline]
    return max(critical, key=lambda figures: figures.busy_share)


def _limit_line(plan: Plan, simulation: Simulation) -> Text:
    figures = _limiting_stage(simulation)
    devices = join_devices(plan.pipelines[figures.pipeline].stages[figures.stage].devices)
    return Text(
        f"limited by pipeline {figures.pipeline}, stage {figures.stage} ({devices}), "
        f"busy {100 * figures.busy_share:.0f} % of the step"
    )


def _solver_lines(solver: SolverInfo) -> Iterator[Text]:
    proof = (
        "proved best"
        if solver.status == "optimal"
        else f"at most {100 * solver.gap:.1f} % above the best possible"
    )
    yield Text(f"{proof}: no plan takes less than {format_seconds(solver.bound_s)}")
    if solver.pruned:
        counts = ", ".join(f"{rule} {number:,}" for rule, number in solver.pruned.items())
        yield Text(f"left out without a look: {counts}")


def _unused_lines(unused: tuple[UnusedDevice, ...]) -> Iterator[Text]:
    by_reason: dict[str, list[str]] = {}
    for entry in unused:
        by_reason.setdefault(entry.reason, []).append(entry.device)
    for reason, devices in by_reason.items():
        yield Text(f"unused: {join_devices(devices)}: {reason}")


def comparison_table(
    answers: Mapping[str, SearchReport | InfeasibleError], *, baseline: str = "even"
) -> Table:
    """Strategies side by side, each with its speed-up over the baseline."""
    table = new_table(
        left=("strategy",),
        right=("step", "tokens/s", f"over {baseline}", "pipelines", "devices", "fullest"),
        last=("shares",),
        droppable=("fullest", "devices", "pipelines", "tokens/s"),
    )
    reference = answers.get(baseline)
    for name, answer in answers.items():
        if isinstance(answer, InfeasibleError):
            table.add_row(name, "-", "-", "-", "-", "-", "-", f"infeasible: {answer.binding}")
            continue
        plan, simulation = answer.plan, answer.simulation
        speed_up = (
            f"{reference.step_time_s / answer.step_time_s:.2f} x"
            if isinstance(reference, SearchReport)
            else "-"
        )
        table.add_row(
            name,
            format_seconds(simulation.step_time_s),
            f"{simulation.tokens_per_s:,.0f}",
            speed_up,
            str(len(plan.pipelines)),
            str(len(plan.ranks)),
            f"{max(100 * m.bytes / m.capacity_bytes for m in simulation.memory):.0f} %",
            _shares(plan),
        )
    return table


def _shares(plan: Plan) -> str:
    """``5x1 3x1``, or ``4 of 2x1`` where many pipelines have the same."""
    counts: dict[str, int] = {}
    for pipeline in plan.pipelines:
        share = f"{pipeline.micro_batches}x{pipeline.micro_batch_size}"
        counts[share] = counts.get(share, 0) + 1
    return ", ".join(
        share if number == 1 else f"{number} of {share}" for share, number in counts.items()
    )
