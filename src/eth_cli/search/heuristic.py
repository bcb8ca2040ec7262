"""Good plans quickly: families chosen by the integer program, cut, shared out, placed, simulated.

The integer program works with lower bounds on times, so its answer for a target is a little
optimistic; targets are raised in small steps and every answer is simulated. The best is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from eth_cli.search.assign import Chosen, choose, columns
from eth_cli.search.capacity import Families
from eth_cli.search.exhaust import Best
from eth_cli.search.layouts import LaidOut
from eth_cli.search.place import Share, place
from eth_cli.search.shares import Worker, level
from eth_cli.search.templates import Counts, Ints, Option, Problem, Template, TemplateStage
from eth_cli.search.timeline import Clock

TARGETS = (1.0, 1.001, 1.003, 1.01, 1.02, 1.04, 1.08, 1.16, 1.32, 1.64, 2.3, 4.0, float("inf"))
"""Target times that are tried, in units of the lower bound."""

STALE_TARGETS = 4
"""Targets in a row without a better plan after which the search for one ends."""


def improve(problem: Problem, families: Families, best: Best, *, bound_s: float) -> None:
    """Offer plans of all devices, then of the fastest kinds only, for targets up to the best."""
    _offer_single(problem, families, best)
    fast_to_slow = sorted(range(len(problem.kinds)), key=problem.seconds_a_sample)
    for num_kinds in range(len(fast_to_slow), 0, -1):
        counts = tuple(
            n if k in fast_to_slow[:num_kinds] else 0 for k, n in enumerate(problem.counts)
        )
        _raise_targets(problem, families, counts, best, bound_s)


def _raise_targets(
    problem: Problem, families: Families, counts: Counts, best: Best, bound_s: float
) -> None:
    """Plans of some devices for rising targets, until they stop getting better."""
    stale = 0
    seen: set[tuple[Chosen, ...]] = set()
    for factor in TARGETS:
        target_s = bound_s * factor
        if target_s >= best.limit_s or stale == STALE_TARGETS or problem.is_over():
            return
        found_columns, num_dominated = columns(families, target_s)
        best.prune("dominated", num_dominated)
        within = [
            column
            for column in found_columns
            if all(u <= n for u, n in zip(column.vector, counts, strict=True))
        ]
        if not within:
            continue
        _, chosen = choose(within, counts, problem.global_batch_size)
        if chosen is None or tuple(chosen) in seen:
            continue
        seen.add(tuple(chosen))
        templates = [_template(families, c) for c in chosen]
        found = [template for template in templates if template is not None]
        is_better = len(found) == len(chosen) and offer_templates(problem, found, best)
        stale = 0 if is_better else stale + 1


def _template(families: Families, chosen: Chosen) -> Template | None:
    """The cut of a chosen family; None: its memory has no room for so many micro-batches.

    That can be for a number between two of the grid, where a family's capacity is optimistic;
    the cut for the number below is then as good, for the shares are made anew anyway.
    """
    b = chosen.micro_batch_size
    template = families.template(chosen.vector, b, chosen.micro_batches)
    if template is None:
        below = max(m for m in families.grids[b] if m <= chosen.micro_batches)
        template = families.template(chosen.vector, b, below)
    return template


def _offer_single(problem: Problem, families: Families, best: Best) -> None:
    """The best family of one pipeline alone, for every micro-batch size."""
    for b in problem.micro_batch_sizes:
        micro_batches, rest = divmod(problem.global_batch_size, b)
        times = families.times_s[b][-1]
        index = int(times.argmin())
        if rest == 0 and times[index] < best.limit_s:
            template = families.template(families.vectors[index], b, micro_batches)
            if template is not None:
                offer_templates(problem, [template], best)


def offer_templates(problem: Problem, templates: Sequence[Template], best: Best) -> bool:
    """Share the batch out over templates, place them both ways, simulate. Whether it is better."""
    shares = share_out(problem, templates)
    if shares is None:
        return False
    found = False
    for bundles in (None, [range(len(shares))]):
        pipelines = place(
            shares,
            problem.kinds,
            problem.model.cluster,
            bundles=bundles,
            excluded=problem.excluded,
        )
        if pipelines is not None:
            time_s = problem.model.evaluate(pipelines).step_time_s
            found = best.offer(pipelines, time_s) or found
    return found


def offer_bundles(problem: Problem, pipelines: Sequence[LaidOut], best: Best) -> float:
    """Share the batch out, lay pipelines out as they were meant to be, simulate: the step time [s].

    A second time with the shares that the simulated transfers make best. Infinite where the batch
    cannot be shared out so, or a group has no node.
    """
    ordered = sorted(pipelines, key=lambda p: p.bundle)
    templates = [p.bundle.template for p in ordered]
    clocks = {p.bundle: Clock(p.times) for p in ordered}
    split = level(
        [Worker(p.bundle.template.micro_batch_size, p.most, clocks[p.bundle]) for p in ordered],
        problem.global_batch_size,
    )
    if split is None:
        return float("inf")
    placed = place(
        [Share(t, m) for t, m in zip(templates, split, strict=True)],
        problem.kinds,
        problem.model.cluster,
        bundles=bundles_of(ordered),
        excluded=problem.excluded,
    )
    if placed is None:
        return float("inf")
    model = problem.model
    times = model.plan_times(placed)
    real = {t: Clock(t) for t in dict.fromkeys(times)}
    workers = [
        Worker(p.bundle.template.micro_batch_size, p.most, real[t])
        for p, t in zip(ordered, times, strict=True)
    ]
    found_s = model.evaluate(placed).step_time_s
    best.offer(placed, found_s)
    again = level(workers, problem.global_batch_size)
    if again is not None and again != split:
        placed = tuple(p._replace(micro_batches=m) for p, m in zip(placed, again, strict=True))
        again_s = model.evaluate(placed).step_time_s
        best.offer(placed, again_s)
        found_s = min(found_s, again_s)
    return found_s


def bundles_of(pipelines: Sequence[LaidOut]) -> list[list[int]]:
    """Like neighbours by index, as many together as each asks for."""
    found: list[list[int]] = []
    for i, pipeline in enumerate(pipelines):
        bundle = pipeline.bundle
        if not i or bundle != pipelines[i - 1].bundle or len(found[-1]) == bundle.copies:
            found.append([])
        found[-1].append(i)
    return found


def share_out(problem: Problem, templates: Sequence[Template]) -> list[Share] | None:
    """The best shares for templates over the fastest links; None: the batch cannot be split so."""
    ordered = sorted(templates)
    workers = {
        t: Worker(t.micro_batch_size, problem.max_micro_batches(t), Clock(problem.times(t)))
        for t in dict.fromkeys(ordered)
    }
    split = level([workers[t] for t in ordered], problem.global_batch_size)
    if split is None:
        return None
    return [Share(t, m) for t, m in zip(ordered, split, strict=True)]


_TRIED_PLACES = 256
"""Places for one more stage that are tried, times the number of pipelines."""
_GROWN = 32
"""Pipelines that are tried with one more device, divided by the number of pipelines."""


# --- Local search: one more device ------------------------------------------------------------


def with_one_more(
    problem: Problem,
    templates: Sequence[Template],
    kind: int,
    *,
    max_pipelines: int | None = None,
) -> Best:
    """The best plan that also uses a device of a kind: as a stage more anywhere, or on its own.

    Of a kind that has wider groups only, the narrowest group. Looks at some different pipelines,
    fewer where there are many, each with its cuts made anew.
    """
    best = Best(max_pipelines=max_pipelines)
    for template in list(Counter(templates))[: max(1, _GROWN // len(templates))]:
        others = list(templates)
        others.remove(template)
        more = _narrowest(problem, kind, template.micro_batch_size)
        if more is not None and len(template.stages) < problem.num_blocks:
            places = len(template.stages) + 1
            for at in range(0, places, max(1, places * len(templates) // _TRIED_PLACES)):
                options = [s.option for s in template.stages]
                options.insert(at, more)
                longer = recut(problem, options, template.micro_batch_size)
                if longer is not None:
                    offer_templates(problem, [*others, longer], best)
    if max_pipelines is not None and len(templates) >= max_pipelines:
        return best
    for b in problem.micro_batch_sizes:
        more = _narrowest(problem, kind, b)
        alone = None if more is None else recut(problem, [more], b)
        if alone is not None:
            offer_templates(problem, [*templates, alone], best)
    return best


def _narrowest(problem: Problem, kind: int, micro_batch_size: int) -> Option | None:
    """The option of a kind that takes fewest devices; None: the profile has none at this size."""
    device_type, tables = problem.kinds[kind].device_type, problem.model.tables
    found = [
        o
        for o in problem.options
        if o.kind == kind
        if not o.recompute and tables.has(device_type, o.tensor_parallel, micro_batch_size)
    ]
    return min(found, default=None)


def recut(problem: Problem, options: Sequence[Option], micro_batch_size: int) -> Template | None:
    """The cut over an ordered list of options with the least slowest stage; None: nothing fits.

    Exact, for stages that may hold as many micro-batches in flight as their place can ask for.
    """
    num_stages = len(options)
    num_blocks = problem.num_blocks
    most = problem.global_batch_size // micro_batch_size
    costs = [problem.costs(o, micro_batch_size) for o in options]
    # By first block: the slowest stage of the stages from s on, and where the first of them stops.
    best = np.append(np.full(num_blocks, np.inf), 0.0)
    stops = []
    for s in range(num_stages - 1, -1, -1):
        need = min(most, num_stages - s)
        work = np.where(costs[s].in_flight >= need, costs[s].work_s, np.inf)
        slowest = np.maximum(work, best[None, :])
        stops.append(slowest.argmin(axis=1))
        best = slowest.min(axis=1)
    if not np.isfinite(best[0]):
        return None
    stages, start = [], 0
    for option, row in zip(options, reversed(stops), strict=True):
        stop = int(row[start])
        stages.append(TemplateStage(option.kind, start, stop, *option[1:]))
        start = stop
    return Template(micro_batch_size, tuple(stages))


def uniform(problem: Problem, b: int, options: Iterable[Option]) -> list[Template]:
    """For each option and number of stages: the cut with the least slowest stage, as `recut`."""
    n = problem.num_blocks
    found = []
    for option in options:
        problem.check_over()
        costs = problem.costs(option, b)
        devices = problem.groups[option.kind, option.tensor_parallel]
        below = np.full(n + 1, np.inf)
        below[-1] = 0.0
        stops: list[Ints] = []
        for num_stages in range(1, min(n, devices) + 1):
            need = min(num_stages, problem.global_batch_size // b)
            work = np.where(costs.in_flight >= need, costs.work_s, np.inf)
            square = np.maximum(work, below)
            stop = square.argmin(axis=1)
            below = square[np.arange(n + 1), stop]
            stops.append(stop)
            if not np.isfinite(below).any():
                break
            if np.isfinite(below[0]):
                start, stages = 0, []
                for at in reversed(stops):
                    stages.append(TemplateStage(option.kind, start, int(at[start]), *option[1:]))
                    start = int(at[start])
                found.append(Template(b, tuple(stages)))
    return found
