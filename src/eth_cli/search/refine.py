"""Small changes to a plan on its devices, judged by the simulator: the last percent.

Moves: the batch shared out anew; micro-batches from one pipeline to another; a cut one block up or
down, in one pipeline or in all that have it (which keeps the cuts aligned and the segments few); a
pipeline left out. The first move that helps is taken, until none does or the budget ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from eth_cli.search.cost import CostModel
from eth_cli.search.exhaust import Best
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.shares import levelled

Pipelines = tuple[PlacedPipeline, ...]

_SIMULATION = 20
"""Cost of a simulation beside that of its pipelines, 1 each."""


def refine(
    model: CostModel,
    pipelines: Pipelines,
    best: Best,
    *,
    budget: int,
    is_over: Callable[[], bool] = lambda: False,
    is_allowed: Callable[[Pipelines], bool] = lambda _: True,
) -> int:
    """Offer every plan on the way from ``pipelines`` up the hill.

    Args:
        budget: what may be spent; a simulation costs a little, and more with every pipeline.
        is_over: asked before every simulation whether to end.
        is_allowed: whether a plan may be taken; where it says no, the plan is not looked at.

    Returns:
        What is left of the budget.
    """
    current, current_s = pipelines, model.evaluate(pipelines).step_time_s
    best.offer(current, current_s)
    improved = True
    while improved:
        improved = False
        for candidate in _moves(model, current):
            if budget <= 0 or is_over():
                return 0
            if not is_allowed(candidate):
                continue
            if not fits(model, candidate):
                continue
            budget -= _SIMULATION + len(candidate)
            time_s = model.evaluate(candidate).step_time_s
            best.offer(candidate, time_s)
            if time_s < current_s * (1 - 1e-9):
                current, current_s = candidate, time_s
                improved = True
                break
    return budget


def fits(model: CostModel, pipelines: Sequence[PlacedPipeline]) -> bool:
    """Whether no device is over its memory."""
    return all(
        model.memory(pipeline, s).total_bytes
        <= model.cluster.device_types[stage.devices[0].type].memory_bytes
        for pipeline in {_sort_of(pipeline): pipeline for pipeline in pipelines}.values()
        for s, stage in enumerate(pipeline.stages)
    )


def _sort_of(pipeline: PlacedPipeline) -> object:
    """Equal for pipelines of the same memory: all but the identity of the devices."""
    return (
        pipeline.micro_batch_size,
        pipeline.micro_batches,
        tuple((*s[:2], s.devices[0].type, len(s.devices), s.recompute) for s in pipeline.stages),
    )


def _moves(model: CostModel, pipelines: Pipelines) -> Iterator[Pipelines]:
    total = sum(p.micro_batches * p.micro_batch_size for p in pipelines)
    yield from _shared_out(model, pipelines, total)
    yield from _share_moves(pipelines)
    yield from _cut_moves(pipelines)
    for pipeline in dict.fromkeys(pipelines):
        rest = list(pipelines)
        rest.remove(pipeline)
        yield from _shared_out(model, rest, total)


def _shared_out(
    model: CostModel, pipelines: Sequence[PlacedPipeline], total: int
) -> Iterator[Pipelines]:
    """The same pipelines with the shares that end soonest, sync aside."""
    if not pipelines:
        return
    shared = levelled(model, pipelines, total)
    if shared is not None:
        yield shared


def _cut_moves(pipelines: Pipelines) -> Iterator[Pipelines]:
    for step in (1, -1):
        cuts = sorted({stage.start for p in pipelines for stage in p.stages[1:]})
        for cut in cuts:
            holders = [i for i, p in enumerate(pipelines) if any(s.start == cut for s in p.stages)]
            groups = [holders] if len(holders) == 1 else [holders, *([i] for i in holders)]
            for group in groups:
                moved = list(pipelines)
                shifted = [_shift(pipelines[i], cut, step) for i in group]
                if None in shifted:
                    continue
                for i, pipeline in zip(group, shifted, strict=True):
                    assert pipeline is not None
                    moved[i] = pipeline
                yield tuple(moved)


def _shift(pipeline: PlacedPipeline, cut: int, step: int) -> PlacedPipeline | None:
    """The pipeline with a cut moved; None: a stage would be empty."""
    stages = list(pipeline.stages)
    at = next(s for s, stage in enumerate(stages) if stage.start == cut)
    before, after = stages[at - 1], stages[at]
    if not before.start < cut + step < after.stop:
        return None
    stages[at - 1] = before._replace(stop=cut + step)
    stages[at] = after._replace(start=cut + step)
    return pipeline._replace(stages=tuple(stages))


def _share_moves(pipelines: Pipelines) -> Iterator[Pipelines]:
    """As few samples as two pipelines can exchange, each way; like pairs only once."""
    seen: set[tuple[PlacedPipeline, PlacedPipeline]] = set()
    for i, giver in enumerate(pipelines):
        for j, taker in enumerate(pipelines):
            if i == j or (giver, taker) in seen:
                continue
            seen.add((giver, taker))
            samples = math.lcm(giver.micro_batch_size, taker.micro_batch_size)
            left = giver.micro_batches - samples // giver.micro_batch_size
            if left >= 1:
                moved = list(pipelines)
                moved[i] = giver._replace(micro_batches=left)
                moved[j] = taker._replace(
                    micro_batches=taker.micro_batches + samples // taker.micro_batch_size
                )
                yield tuple(moved)
