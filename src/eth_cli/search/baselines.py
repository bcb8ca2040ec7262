"""The two honest baselines: a grid of D pipelines x P stages with equal shares on every device.

`even` cuts every pipeline into as equal numbers of transformer blocks as possible (embedding and
head go with the first and last stage). `uneven-layers` has one cut too, but balances it to the
slowest device of each stage column, or keeps the even one where that is better. Both get the best
D, micro-batch size and natural order of the devices (fast to slow by column, or by row). Where no
grid over all devices is feasible, the fewest are left out, slowest first; `uneven-layers` leaves
the slowest types out as well where that is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eth_cli.cluster import Device
from eth_cli.errors import InfeasibleError
from eth_cli.model import EMBEDDING, HEAD
from eth_cli.schedule import num_in_flight
from eth_cli.search.memory import stage_memory
from eth_cli.search.order import canonical_nodes
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.refine import fits
from eth_cli.search.request import EVEN
from eth_cli.search.shares import levelled
from eth_cli.search.templates import Floats, Option, Problem, SearchOverError
from eth_cli.units import format_bytes, format_seconds

Grid = tuple[tuple[Device, ...], ...]
"""Devices by pipeline and stage."""
Cut = tuple[tuple[int, int], ...]
"""``[start, stop)`` of every stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselinePlan:
    """The best grid of a baseline."""

    pipelines: tuple[PlacedPipeline, ...]
    step_time_s: float
    num_used: int
    """Devices in the grid."""
    why_left_out: str
    """Why it leaves usable devices out; empty when it leaves none out."""
    num_tried: int
    """Grids looked at."""


def best_grid(
    problem: Problem,
    strategy: str,
    *,
    max_pipelines: int | None = None,
    level_shares: bool = False,
) -> BaselinePlan:
    """The best plan of a baseline (``even`` or ``uneven-layers``).

    ``uneven-layers`` is the best single configuration that one would find by trying: an even cut
    is one of its choices, and so is the cluster without its slowest types of devices.

    Args:
        level_shares: whether the batch may also be shared out unequally over a grid.

    Raises:
        InfeasibleError: no grid over any number of devices fits.
        SearchOverError: the time of the search was over before any was found.
    """
    devices = _fast_to_slow(problem)
    if strategy == EVEN:
        return _fullest_grid(problem, strategy, devices, max_pipelines, level_shares)
    found = []
    failures = []
    for num_used in range(len(devices), 0, -1):
        if num_used < len(devices) and devices[num_used].type == devices[num_used - 1].type:
            continue
        for cut in (strategy, EVEN):
            try:
                used = devices[:num_used]
                found.append(_fullest_grid(problem, cut, used, max_pipelines, level_shares))
            except InfeasibleError as error:
                failures.append(error)
            except SearchOverError:
                if not found:
                    raise
    if not found:
        raise failures[0]
    best = min(found, key=lambda plan: plan.step_time_s)
    num_left_out = len(devices) - best.num_used
    if num_left_out and found[0].num_used > best.num_used:
        why = (
            f"one configuration over {found[0].num_used} devices takes "
            f"{format_seconds(found[0].step_time_s)} a step, this one "
            f"{format_seconds(best.step_time_s)}"
        )
        return replace(best, why_left_out=why)
    return best


def _fullest_grid(
    problem: Problem,
    strategy: str,
    devices: Sequence[Device],
    max_pipelines: int | None,
    level_shares: bool,
) -> BaselinePlan:
    """The best grid over all these devices, or over as many of the fastest as any fits on."""
    num_tried = 0
    reason = ""
    for num_used in range(len(devices), 0, -1):
        best: tuple[float, tuple[PlacedPipeline, ...]] | None = None
        for b, grid in _grids(problem, devices[:num_used], max_pipelines, level_shares):
            if problem.is_over():
                if best is None:
                    raise SearchOverError
                break
            num_tried += 1
            micro_batches, rest = divmod(problem.global_batch_size // b, len(grid))
            cut = _cut(problem, strategy, grid, b, micro_batches)
            if isinstance(cut, str):
                reason = reason or f"{len(grid)} pipelines of {len(grid[0])} stages: {cut}"
                continue
            alike = _pipelines(grid, cut, b, micro_batches)
            candidates = [] if rest else [alike]
            if level_shares:
                shared = levelled(problem.model, alike, problem.global_batch_size)
                if shared is not None and fits(problem.model, shared):
                    candidates.append(shared)
            for pipelines in candidates:
                time_s = problem.model.evaluate(pipelines).step_time_s
                if best is None or time_s < best[0]:
                    best = (time_s, pipelines)
        if best is not None:
            why = ""
            if num_used < len(devices):
                why = "no grid over more devices is feasible: "
                why += reason or _no_grid(problem, devices)
            return BaselinePlan(
                pipelines=best[1],
                step_time_s=best[0],
                num_used=num_used,
                why_left_out=why,
                num_tried=num_tried,
            )
    reason = reason or _no_grid(problem, devices)
    raise InfeasibleError(
        f"no {strategy} plan exists: {reason}",
        binding=reason,
        suggestion="use --strategy hpp, which may cut every pipeline differently",
    )


def _no_grid(problem: Problem, devices: Sequence[Device]) -> str:
    wide = [
        name
        for name in sorted({device.type for device in devices})
        if not any(problem.model.tables.has(name, 1, b) for b in problem.micro_batch_sizes)
    ]
    if wide:
        return (
            "its stages have one device each, and the profile has no entries of "
            f"{', '.join(wide)} at tensor-parallel width 1"
        )
    return (
        f"no number of pipelines divides both {len(devices)} devices and the micro-batches of a "
        f"batch of {problem.global_batch_size} samples into stages of at least one block"
    )


def _fast_to_slow(problem: Problem) -> list[Device]:
    """Usable devices by the time of the whole model on one of them, then in nodes' order."""
    place = {name: i for i, name in enumerate(canonical_nodes(problem.model.cluster))}
    speed = {kind.device_type: problem.seconds_a_sample(k) for k, kind in enumerate(problem.kinds)}
    usable = [
        d
        for d in problem.model.cluster.devices.values()
        if d.type in speed and d.id not in problem.excluded
    ]
    return sorted(usable, key=lambda d: (speed[d.type], d.type, place[d.node]))


def _grids(
    problem: Problem, devices: Sequence[Device], max_pipelines: int | None, level_shares: bool
) -> Iterator[tuple[int, Grid]]:
    """Micro-batch sizes and grids over exactly these devices, with equal shares or any."""
    num_devices = len(devices)
    most = num_devices if max_pipelines is None else min(num_devices, max_pipelines)
    types = sorted({d.type for d in devices})
    for b in problem.micro_batch_sizes:
        num_micro_batches, rest = divmod(problem.global_batch_size, b)
        if rest or not all(problem.model.tables.has(t, 1, b) for t in types):
            continue
        for num_pipelines in range(1, most + 1):
            if num_devices % num_pipelines or num_micro_batches < num_pipelines:
                continue
            if num_micro_batches % num_pipelines and not level_shares:
                continue
            num_stages = num_devices // num_pipelines
            if num_stages > problem.num_blocks:
                continue
            rows = tuple(
                tuple(devices[i * num_stages + s] for s in range(num_stages))
                for i in range(num_pipelines)
            )
            columns = tuple(
                tuple(devices[s * num_pipelines + i] for s in range(num_stages))
                for i in range(num_pipelines)
            )
            yield b, rows
            # Which node a device is in decides its links, so like types alone do not make the two
            # the same.
            if _sorts(columns) != _sorts(rows):
                yield b, columns


def _sorts(grid: Grid) -> list[list[tuple[str, str]]]:
    return [[(d.node, d.type) for d in row] for row in grid]


def _pipelines(
    grid: Grid, cut: Cut, micro_batch_size: int, micro_batches: int
) -> tuple[PlacedPipeline, ...]:
    return tuple(
        PlacedPipeline(
            micro_batch_size,
            micro_batches,
            tuple(PlacedStage(*blocks, (d,)) for blocks, d in zip(cut, row, strict=True)),
        )
        for row in grid
    )


def _cut(
    problem: Problem, strategy: str, grid: Grid, micro_batch_size: int, micro_batches: int
) -> Cut | str:
    """The cut that all pipelines share; a text that says why there is none."""
    num_stages = len(grid[0])
    kind_of = {kind.device_type: k for k, kind in enumerate(problem.kinds)}
    columns = [sorted({kind_of[row[s].type] for row in grid}) for s in range(num_stages)]
    needs = [
        num_in_flight(s, num_stages=num_stages, num_micro_batches=micro_batches)
        for s in range(num_stages)
    ]
    if strategy == EVEN:
        return _even(problem, columns, needs, micro_batch_size)
    return _balanced(problem, columns, needs, micro_batch_size)


def _even(
    problem: Problem, columns: Sequence[Sequence[int]], needs: Sequence[int], b: int
) -> Cut | str:
    cut = even_cut(problem.model.profile.model.kinds, len(columns))
    if cut is None:
        return f"the model has too few transformer blocks for {len(columns)} even stages"
    for s, (start, stop) in enumerate(cut):
        for k in columns[s]:
            if problem.costs(Option(k), b).in_flight[start, stop] < needs[s]:
                return _lacks(problem, s, (start, stop), k, b, needs[s])
    return cut


def even_cut(kinds: Sequence[str], num_stages: int) -> Cut | None:
    """As equal numbers of blocks as possible; None: a stage would hold no transformer block.

    A leading embedding and a trailing head go with their neighbour and are not counted; where
    blocks do not divide, the first stages get one more. With fewer blocks between them than
    stages, embedding and head count as blocks like the others.
    """
    first = 1 if kinds[0] == EMBEDDING else 0
    last = len(kinds) - 1 if kinds[-1] == HEAD else len(kinds)
    if last - first < num_stages:
        first, last = 0, len(kinds)
    each, more = divmod(last - first, num_stages)
    if each == 0:
        return None
    edges = [first]
    for s in range(num_stages):
        edges.append(edges[-1] + each + (s < more))
    edges[0], edges[-1] = 0, len(kinds)
    return tuple(itertools.pairwise(edges))


def _balanced(
    problem: Problem, columns: Sequence[Sequence[int]], needs: Sequence[int], b: int
) -> Cut | str:
    """The cut with the least slowest stage; of those, the one with the least work in all."""
    works = []
    for s, kinds in enumerate(columns):
        work = np.zeros((problem.num_blocks + 1, problem.num_blocks + 1))
        for k in kinds:
            costs = problem.costs(Option(k), b)
            work = np.maximum(work, np.where(costs.in_flight >= needs[s], costs.work_s, np.inf))
        works.append(work)
    pace = _suffixes(works, np.maximum)[0][0]
    if not np.isfinite(pace):
        names = ", ".join(
            problem.kinds[k].device_type for k in sorted({*itertools.chain(*columns)})
        )
        return f"no cut fits the memory of its devices ({names}) at micro-batch size {b}"
    limited = [np.where(work <= pace, work, np.inf) for work in works]
    sums = _suffixes(limited, np.add)
    cut, start = [], 0
    for s, work in enumerate(limited):
        stop = problem.num_blocks
        if s + 1 < len(limited):
            stop = int((work[start] + sums[s + 1]).argmin())
        cut.append((start, stop))
        start = stop
    return tuple(cut)


def _suffixes(works: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """By stage and first block: the best of all cuts of the blocks from there on."""
    best: Floats = works[-1][:, -1]
    found = [best]
    for work in reversed(works[:-1]):
        best = join(work, best[None, :]).min(axis=1)
        found.append(best)
    return found[::-1]


def _lacks(problem: Problem, s: int, blocks: tuple[int, int], k: int, b: int, need: int) -> str:
    kind = problem.kinds[k]
    table = problem.model.tables.table(kind.device_type, 1, b)
    needed = stage_memory(
        problem.model.profile, table, start=blocks[0], stop=blocks[1], num_in_flight=need
    ).total_bytes
    return (
        f"stage {s} (blocks {blocks[0]} to {blocks[1] - 1}) needs {format_bytes(needed)} on "
        f"{kind.device_type}, which has {format_bytes(kind.capacity_bytes)}: "
        f"{needed - kind.capacity_bytes} bytes are lacking"
    )
