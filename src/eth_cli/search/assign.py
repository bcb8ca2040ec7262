"""How many pipelines of each family, and what share of the batch each gets: an integer program.

Notation: family c takes u_ck devices of kind k, has micro-batches of b_c samples and finishes at
most m_c of them within the target time T (`capacity.Families.capacity`). n_k devices of kind k,
G samples a batch. Unknown: x_c pipelines of family c, y_c micro-batches in all of them.

    maximize  sum_c b_c m_c x_c            (spare capacity: the real schedule is a little slower)
    subject to  sum_c u_ck x_c <= n_k      for every kind
                sum_c b_c y_c = G,   x_c <= y_c <= m_c x_c,   x, y integers >= 0

Without the integrality it is the LP whose value below G proves that no plan meets T: `LpBound`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pulp

from eth_cli.search.capacity import Families
from eth_cli.search.solver import SolverResult, solve
from eth_cli.search.templates import Counts, Problem

_SOLVER_TOLERANCE = 1e-6
"""Relative error that a solver's optimum may have; ten times its feasibility tolerance."""


class Column(NamedTuple):
    """A family that can take part, within some target time."""

    vector: Counts
    micro_batch_size: int
    max_micro_batches: int

    @property
    def max_samples(self) -> int:
        """Samples that one such pipeline can do."""
        return self.micro_batch_size * self.max_micro_batches


class Chosen(NamedTuple):
    """One pipeline of the answer."""

    vector: Counts
    micro_batch_size: int
    micro_batches: int


def columns(families: Families, time_s: float) -> tuple[list[Column], int]:
    """Families that finish a micro-batch within a time, dominated ones left out; how many were.

    A column is dominated by another of the same micro-batch size that takes no more devices of
    any kind and finishes as much: any plan with the first is a plan with the second.
    """
    kept: list[Column] = []
    num_dominated = 0
    for b in families.grids:
        capacity = families.capacity(b, time_s)
        useful = families.space.beats_smaller(capacity)
        num_dominated += int(np.count_nonzero(capacity) - np.count_nonzero(useful))
        kept += [Column(families.vectors[i], b, int(capacity[i])) for i in np.flatnonzero(useful)]
    return kept, num_dominated


def choose(
    found: Sequence[Column], counts: Counts, global_batch_size: int
) -> tuple[SolverResult, list[Chosen] | None]:
    """Pipelines that do the whole batch within the columns' time; None: no solver found any.

    The answer is rounded to integers and checked here against every constraint.
    """
    problem = pulp.LpProblem("assign", pulp.LpMaximize)
    x = [
        pulp.LpVariable(f"x{c}", 0, _most(column.vector, counts), cat="Integer")
        for c, column in enumerate(found)
    ]
    y = [
        pulp.LpVariable(f"y{c}", 0, global_batch_size // column.micro_batch_size, cat="Integer")
        for c, column in enumerate(found)
    ]
    problem += pulp.lpSum(c.max_samples * x[i] for i, c in enumerate(found))
    for k, count in enumerate(counts):
        problem += pulp.lpSum(c.vector[k] * x[i] for i, c in enumerate(found)) <= count
    problem += (
        pulp.lpSum(c.micro_batch_size * y[i] for i, c in enumerate(found)) == global_batch_size
    )
    for i, column in enumerate(found):
        problem += y[i] <= column.max_micro_batches * x[i]
        problem += y[i] >= x[i]
    result = solve(problem, [*x, *y])
    if not result.has_solution:
        return result, None
    values = [round(value) for value in result.variables]
    chosen = _expand(found, values[: len(found)], values[len(found) :])
    return result, chosen if _is_valid(chosen, found, counts, global_batch_size) else None


def _most(vector: Counts, counts: Counts) -> int:
    return min(n // u for n, u in zip(counts, vector, strict=True) if u)


def _expand(found: Sequence[Column], x: Sequence[int], y: Sequence[int]) -> list[Chosen]:
    """One entry a pipeline; a family's micro-batches spread evenly over its pipelines."""
    chosen = []
    for column, num_pipelines, num_micro_batches in zip(found, x, y, strict=True):
        if num_pipelines:
            each, more = divmod(num_micro_batches, num_pipelines)
            chosen += [
                Chosen(column.vector, column.micro_batch_size, each + (i < more))
                for i in range(num_pipelines)
            ]
    return chosen


def _is_valid(
    chosen: Sequence[Chosen], found: Sequence[Column], counts: Counts, global_batch_size: int
) -> bool:
    most = {(c.vector, c.micro_batch_size): c.max_micro_batches for c in found}
    return (
        sum(c.micro_batches * c.micro_batch_size for c in chosen) == global_batch_size
        and all(1 <= c.micro_batches <= most[c.vector, c.micro_batch_size] for c in chosen)
        and all(sum(c.vector[k] for c in chosen) <= n for k, n in enumerate(counts))
    )


# --- Bounds ---------------------------------------------------------------------------------------


def best_capacity_lp(found: Sequence[Column], counts: Counts) -> float:
    """Samples that any number of pipelines, fractions allowed, can do: an upper bound."""
    if not found:
        return 0.0
    problem = pulp.LpProblem("capacity", pulp.LpMaximize)
    x = [pulp.LpVariable(f"x{c}", 0) for c in range(len(found))]
    problem += pulp.lpSum(c.max_samples * x[i] for i, c in enumerate(found))
    for k, count in enumerate(counts):
        problem += pulp.lpSum(c.vector[k] * x[i] for i, c in enumerate(found)) <= count
    result = solve(problem, x)
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
    program = pulp.LpProblem("work", pulp.LpMinimize)
    time = pulp.LpVariable("T", 0)
    program += time
    terms: dict[str, list[pulp.LpVariable]] = {sort: [] for sort in sorts}
    unit_s = 0.0
    rates: list[tuple[int, str, float]] = []
    for k in range(len(problem.kinds)):
        for sort in sorts:
            block = kinds.index(sort)
            rate = min(
                (_block_s(problem, k, block, b) / b for b in problem.micro_batch_sizes),
            )
            if rate < float("inf"):
                rates.append((k, sort, rate))
                unit_s = max(unit_s, rate)
    for k, kind in enumerate(problem.kinds):
        mine = [(sort, rate) for j, sort, rate in rates if j == k]
        x = {sort: pulp.LpVariable(f"x{k}_{sorts.index(sort)}", 0) for sort, _ in mine}
        for sort in x:
            terms[sort].append(x[sort])
        # In units of the whole batch and of the slowest block: well scaled for the solver.
        program += (
            pulp.lpSum(kinds.count(sort) * (rate / unit_s) * x[sort] for sort, rate in mine)
            <= kind.num_devices * time
        )
    for sort in sorts:
        program += pulp.lpSum(terms[sort]) == 1
    result = solve(program, [time])
    # Without an optimum: every sample takes each block's fastest device, shared by all of them.
    spread_s = sum(
        kinds.count(sort) * min(rate for _, j, rate in rates if j == sort) for sort in sorts
    ) / sum(problem.counts)
    if result.bound is None:
        return spread_s * problem.global_batch_size
    return result.bound * unit_s * problem.global_batch_size * (1 - _SOLVER_TOLERANCE)


def _block_s(problem: Problem, kind: int, block: int, micro_batch_size: int) -> float:
    device_type = problem.kinds[kind].device_type
    if not problem.model.tables.has(device_type, 1, micro_batch_size):
        return float("inf")
    table = problem.model.tables.table(device_type, 1, micro_batch_size)
    return sum(table.times_s(block, block + 1))


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
