"""Devices that a plan leaves out: why, and better plans that turn up when one more is tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eth_cli.search.exhaust import Best
from eth_cli.search.heuristic import with_one_more
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.templates import Problem, Template, TemplateStage
from eth_cli.units import format_seconds

NOT_LOOKED_AT = "the search ended before a place for it was looked for"
"""Why a device is unused where nobody knows."""
_GROWTH = 32
"""Devices that are added to a plan one by one after the search, divided by its pipelines."""


def unused_types(problem: Problem, pipelines: Sequence[PlacedPipeline]) -> list[str]:
    """Usable types of which the plan leaves out a device."""
    used = Counter(d.type for p in pipelines for stage in p.stages for d in stage.devices)
    return [k.device_type for k in problem.kinds if used[k.device_type] < k.num_devices]


def explain_unused(problem: Problem, best: Best, *, is_final: bool) -> dict[str, str]:
    """Why each type has devices left. The plan in ``best`` grows where that makes it better.

    Args:
        is_final: whether the plan is proved to be the best, so that nothing can.
    """
    assert best.pipelines is not None
    rounds = 0 if is_final else _GROWTH // len(best.pipelines)
    for turn in range(rounds + 1):
        reasons = {}
        grown = False
        templates = _templates_of(problem, best.pipelines)
        for k, kind in enumerate(problem.kinds):
            if kind.device_type not in unused_types(problem, best.pipelines):
                continue
            if problem.is_over():
                reasons[kind.device_type] = NOT_LOOKED_AT
                continue
            tried = with_one_more(problem, templates, k, max_pipelines=best.max_pipelines)
            best.num_simulated += tried.num_simulated
            if turn < rounds and tried.pipelines is not None:
                grown = best.offer(tried.pipelines, tried.time_s)
                if grown:
                    break
            reasons[kind.device_type] = (
                _why_unused(best.time_s, tried.time_s)
                if tried.pipelines is not None
                else _why_none(problem, best, k)
            )
        if not grown:
            break
    return reasons


def _templates_of(problem: Problem, pipelines: Sequence[PlacedPipeline]) -> list[Template]:
    index = {kind.device_type: k for k, kind in enumerate(problem.kinds)}
    return [
        Template(
            pipeline.micro_batch_size,
            tuple(
                TemplateStage(
                    index[s.devices[0].type], s.start, s.stop, len(s.devices), s.recompute
                )
                for s in pipeline.stages
            ),
        )
        for pipeline in pipelines
    ]


def _why_unused(step_time_s: float, with_it_s: float) -> str:
    return (
        f"would not speed up the plan: {format_seconds(with_it_s)} a step with it in the best "
        f"place found, {format_seconds(step_time_s)} without"
    )


def _why_none(problem: Problem, best: Best, kind: int) -> str:
    """Why no plan was found that uses a device of a kind more."""
    assert best.pipelines is not None
    name = problem.kinds[kind].device_type
    width = min(option.tensor_parallel for option in problem.options if option.kind == kind)
    used = Counter(
        d.node for p in best.pipelines for s in p.stages for d in s.devices if d.type == name
    )
    most = max(number - used[node] for node, number in problem.in_nodes[kind].items())
    if most < width:
        return (
            f"a stage of it needs {width} {name} in one node (tensor-parallel width {width}), and "
            f"no node has more than {most} left"
        )
    alone = ""
    if best.max_pipelines is not None and len(best.pipelines) >= best.max_pipelines:
        alone = f", and a plan may have {best.max_pipelines} pipelines at most"
    return (
        f"fits no pipeline: with it as a stage more, no cut of any pipeline fits in memory{alone}"
    )
