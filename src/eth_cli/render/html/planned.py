"""The plan drawn: pipelines over the blocks of the model, and the memory of their devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.render.html import svg
from eth_cli.render.tables import join_devices
from eth_cli.report import RankMemory
from eth_cli.units import format_bytes

WIDTH = 1080.0
_LEFT, _RIGHT = 150.0, 12.0
_ROW, _BOX = 62.0, 50.0
NUM_COLOURS = 6
"""Colours of device types, after which they begin again."""
_MEMORY_ROW = 24.0
_FIGURES = 345.0
"""Room for the figures beside a bar [px]."""


def colours(plan: Plan) -> dict[str, int]:
    """A colour for each device type of the plan, by first use."""
    found: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            name = type_of(plan, stage)
            found.setdefault(name, len(found) % NUM_COLOURS)
    return found


def type_of(plan: Plan, stage: Stage) -> str:
    """Type of a stage's devices; without a cluster that is not known."""
    return "" if plan.cluster is None else plan.cluster.devices[stage.devices[0]].type


def plan_drawing(plan: Plan) -> str:
    """A row a pipeline: its stages as boxes over the blocks that they hold."""
    scale = svg.Scale(0, plan.num_blocks, _LEFT, WIDTH - _RIGHT)
    of_type = colours(plan)
    bottom = _ROW * len(plan.pipelines)
    parts: list[str] = []
    for value in svg.ticks(0, plan.num_blocks, 12):
        if value == round(value):
            x = scale(value)
            parts.append(svg.line(x, 0, x, bottom, "grid"))
            text = f"{value:.0f}"
            parts.append(svg.label(x, bottom + 14, text, class_="tick", anchor="middle"))
    parts.append(
        svg.label(_LEFT - 12, bottom + 14, "blocks of the model", class_="tick", anchor="end")
    )
    for index, pipeline in enumerate(plan.pipelines):
        y = index * _ROW + (_ROW - _BOX) / 2
        parts += _pipeline_labels(index, pipeline, y)
        for number, stage in enumerate(pipeline.stages):
            parts += _stage(plan, stage, number, scale, y, of_type[type_of(plan, stage)])
    return svg.drawing(WIDTH, bottom + 22, "pipelines and their stages", *parts)


def _pipeline_labels(index: int, pipeline: Pipeline, y: float) -> Iterable[str]:
    yield svg.label(0, y + 21, f"pipeline {index}", class_="label strong")
    plural = "" if pipeline.micro_batches == 1 else "es"
    size = pipeline.micro_batch_size
    text = f"{pipeline.micro_batches} micro-batch{plural} of {size}"
    yield svg.label(0, y + 37, text, class_="tick")


def _stage(
    plan: Plan, stage: Stage, number: int, scale: svg.Scale, y: float, colour: int
) -> Iterable[str]:
    x, stop = scale(stage.blocks[0]), scale(stage.blocks[1])
    width = stop - x - 2
    devices = join_devices(stage.devices)
    name = type_of(plan, stage)
    details = f"blocks [{stage.blocks[0]}, {stage.blocks[1]})"
    if stage.tensor_parallel > 1:
        details += f", width {stage.tensor_parallel}"
    if stage.recompute:
        details += ", recompute"
    told = f"stage {number}: {devices}{f' ({name})' if name else ''}, {details}"
    yield svg.box(x + 1, y, width, _BOX, f"stage type{colour}", svg.title(told), rx=5.0)
    first = f"{devices}  {name}" if name else devices
    if not svg.fitting(first, width - 12).endswith(name):
        first = devices
    yield svg.label(x + 9, y + 21, svg.fitting(first, width - 14), class_="label strong inside")
    yield svg.label(x + 9, y + 38, svg.fitting(details, width - 14), class_="tick inside")


def memory_bars(memory: Sequence[RankMemory], *, limit: int) -> str:
    """A row a rank: predicted and measured peak, and the capacity of its device."""
    shown = memory[:limit]
    most = max((value for m in shown for value in _values(m)), default=0)
    if most == 0:
        return '<p class="empty">nothing is known of the memory of this run</p>'
    scale = svg.Scale(0, most, _LEFT, WIDTH - _RIGHT - _FIGURES)
    parts: list[str] = []
    for index, rank in enumerate(shown):
        y = index * _MEMORY_ROW + 2
        parts += _memory_row(rank, scale, y)
    return svg.drawing(WIDTH, len(shown) * _MEMORY_ROW + 4, "peak memory by rank", *parts)


def _values(memory: RankMemory) -> list[int]:
    values = [memory.predicted_bytes, memory.capacity_bytes]
    if not memory.is_emulated:  # A CPU process is many times as large as what it plays.
        values.append(memory.measured_bytes)
    return [value for value in values if value is not None]


def _memory_row(memory: RankMemory, scale: svg.Scale, y: float) -> Iterable[str]:
    where = f"p{memory.pipeline} s{memory.stage}"
    yield svg.label(0, y + 13, svg.fitting(memory.device, _LEFT - 60), class_="label strong")
    yield svg.label(_LEFT - 12, y + 13, where, class_="tick", anchor="end")
    words = []
    for name, value in (
        ("capacity", memory.capacity_bytes),
        ("predicted", memory.predicted_bytes),
        ("measured", memory.measured_bytes),
    ):
        if value is None:
            continue
        is_drawn = name != "measured" or not memory.is_emulated
        what = "process" if not is_drawn else name
        words.append(f"{what} {format_bytes(value)}")
        if is_drawn:
            height, top = {"capacity": (18, 0), "predicted": (7, 2), "measured": (7, 10)}[name]
            yield svg.box(
                _LEFT,
                y + top,
                max(0.5, scale(value) - _LEFT),
                float(height),
                f"memory {name}",
                svg.title(f"{memory.device}, {name}: {format_bytes(value)}"),
                rx=2.0,
            )
    x = WIDTH - _RIGHT - _FIGURES + 14
    yield svg.label(x, y + 13, " · ".join(words[::-1]), class_="tick")
