"""Lower bounds on the step time of every plan: by the capacity of all devices, and by work alone.

Within a time T each family of pipelines finishes at most so many micro-batches (`capacity`). Where
no number of pipelines that the devices allow does the whole batch so, no plan takes T or less.
A solver's optimum is taken with a margin on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eth_cli.search.assign import Column, columns
from eth_cli.search.capacity import Families
from eth_cli.search.solver import LinearProgram, Row, solve
from eth_cli.search.templates import Counts, Problem

_SOLVER_TOLERANCE = 1e-6
"""Relative error that a solver's optimum may have; ten times its feasibility tolerance."""


def best_capacity_lp(found: Sequence[Column], counts: Counts) -> float:
    """Samples that any number of pipelines, fractions allowed, can do: an upper bound."""
    if not found:
        return 0.0
    rows = [
        Row([(i, column.vector[k]) for i, column in enumerate(found) if column.vector[k]], count)
        for k, count in enumerate(counts)
    ]
    result = solve(LinearProgram(costs=[column.max_samples for column in found], rows=rows))
    # Without an optimum nothing is proved: everything stays possible.
    return float("inf") if result.bound is None else result.bound * (1 + _SOLVER_TOLERANCE)


def best_capacity(found: Sequence[Column], counts: Counts) -> dict[Counts, int]:
    """The same with whole pipelines, for every number of devices up to ``counts``: exact."""
    best: dict[Counts, int] = {}
    items = [(c.vector, c.max_samples) for c in found]
    for available in np.ndindex(*(n + 1 for n in counts)):
        value = 0
        for vector, samples in items:
            rest = tuple(a - u for a, u in zip(available, vector, strict=True))
            if min(rest) >= 0:
                value = max(value, samples + best[rest])
        best[available] = value
    return best


def work_bound_s(problem: Problem) -> float:
    """No plan is faster than its work spread over all devices, no one ever idle [s].

    x_kj samples go through blocks of sort j on devices of kind k, at the best rate of any
    micro-batch size: ``min T`` with ``sum_k x_kj = G`` and ``sum_j count_j w_kj x_kj <= n_k T``.
    """
    kinds = problem.model.profile.model.kinds
    sorts = sorted(set(kinds))
    rates = [
        (k, sort, rate)
        for k in range(len(problem.kinds))
        for sort in sorts
        if (rate := _device_s_a_sample(problem, k, kinds.index(sort))) < float("inf")
    ]
    # In units of the whole batch and of the slowest block: well scaled for the solver.
    unit_s = max(rate for _, _, rate in rates)
    time = len(rates)  # the last column, after an x for each rate
    rows = [
        Row(
            [
                *(
                    (i, kinds.count(sort) * (rate / unit_s))
                    for i, (j, sort, rate) in enumerate(rates)
                    if j == k
                ),
                (time, -kind.num_devices),
            ],
            0.0,
        )
        for k, kind in enumerate(problem.kinds)
    ]
    rows += [
        Row([(i, 1.0) for i, (_, j, _) in enumerate(rates) if j == sort], 1.0, is_equality=True)
        for sort in sorts
    ]
    costs = [0.0] * len(rates) + [1.0]
    result = solve(LinearProgram(costs=costs, rows=rows, is_maximum=False))
    # Without an optimum: every sample takes each block's fastest device, shared by all of them.
    spread_s = sum(
        kinds.count(sort) * min(rate for _, j, rate in rates if j == sort) for sort in sorts
    ) / sum(problem.counts)
    if result.bound is None:
        return spread_s * problem.global_batch_size
    return result.bound * unit_s * problem.global_batch_size * (1 - _SOLVER_TOLERANCE)


def _device_s_a_sample(problem: Problem, kind: int, block: int) -> float:
    """Least device time of a sample through a block on a kind, at any width [s]."""
    return min(
        (
            problem.block_s(o, block, b) * o.tensor_parallel / b
            for o in problem.options
            for b in problem.micro_batch_sizes
            if o.kind == kind
        ),
        default=float("inf"),
    )


def family_bound_s(problem: Problem, families: Families) -> float:
    """No plan is faster than this, whatever its cuts, orders, shares and placement [s].

    A plan of one pipeline is no faster than its family's bound at the whole batch. In a plan of
    several, all of them end at least the sync that cannot hide before the step does; they do the
    batch in that time only if the best capacity of the devices is enough for it.
    """
    total = problem.global_batch_size
    single_s = min(
        (float(families.times_s[b][-1].min()) for b in families.grids if total % b == 0),
        default=float("inf"),
    )
    times = families.candidate_times_s()
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if _capacity(problem, families, float(times[middle])) >= total:
            high = middle
        else:
            low = middle + 1
    several_s = float("inf") if low == len(times) else float(times[low]) + problem.sync_floor_s
    return min(single_s, several_s)


def _capacity(problem: Problem, families: Families, time_s: float) -> float:
    found, _ = columns(families, time_s)
    if len(found) * math.prod(n + 1 for n in problem.counts) <= _EXACT_OPERATIONS:
        return best_capacity(found, problem.counts)[problem.counts]
    return best_capacity_lp(found, problem.counts)


_EXACT_OPERATIONS = 20_000
"""Steps of the exact capacity programme below which it is preferred to the LP."""
