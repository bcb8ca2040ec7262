"""The master problem: which templates, how many of each, and what devices are worth.

Within a step time U a column (a template) does ``b m(U)`` samples. The linear programme

    maximize  sum_c b_c m_c(U) x_c
    subject to  sum_c u_cr x_c <= n_r  for every resource r,  x >= 0

tells what the devices can do at best with these columns, and its dual values are the prices of
`pricing`. The smallest U at which that is the whole batch is where the columns are best mixed. The
integer programme `rounded` makes whole pipelines of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from eth_cli.search.pricing import Resource
from eth_cli.search.solver import LinearProgram, Row, solve

Sort = TypeVar("Sort")

_FIRST = 0.8
"""Part of a time that is enough at which a time that is not is looked for first."""
_NO_SAMPLES = 1e-9
"""Keeps the line between two times that do the same from being level."""


class Column(NamedTuple, Generic[Sort]):
    """A sort of pipelines with what one takes and what it does within some time."""

    sort: Sort
    micro_batch_size: int
    uses: tuple[tuple[Resource, int], ...]
    """Resources and how much of each one such pipeline takes."""
    micro_batches: int
    """Most that it finishes in time."""

    @property
    def samples(self) -> int:
        """Samples of those micro-batches."""
        return self.micro_batch_size * self.micro_batches


class Mix(NamedTuple):
    """The best fractional mix of columns."""

    samples: float
    prices: dict[Resource, float]
    """What one more of a resource would add [samples]."""
    base_price: float
    """What one more pipeline would add where their number is limited [samples]."""


def undominated(columns: Sequence[Column[Sort]]) -> list[Column[Sort]]:
    """Of columns that take the same, the one that does most; none that does nothing."""
    best: dict[object, Column[Sort]] = {}
    for column in columns:
        known = best.get(column.uses)
        if column.micro_batches and (known is None or column.samples > known.samples):
            best[column.uses] = column
    return list(best.values())


def best_mix(
    columns: Sequence[Column[Sort]], available: Mapping[Resource, int], max_pipelines: int | None
) -> Mix | None:
    """The linear programme's answer; None: the solver had none."""
    if not columns:
        return Mix(0.0, dict.fromkeys(available, 0.0), 0.0)
    limits = _limits(columns, available, max_pipelines)
    result = solve(LinearProgram(costs=[column.samples for column in columns], rows=limits))
    if result.value is None:
        return None
    base = 0.0 if max_pipelines is None else result.duals[-1]
    return Mix(result.value, dict(zip(available, result.duals, strict=False)), base)


def _limits(
    columns: Sequence[Column[Sort]], available: Mapping[Resource, int], max_pipelines: int | None
) -> list[Row]:
    """A row for each resource, in order, and a last one for the number of pipelines if limited."""
    terms: dict[Resource, list[tuple[int, float]]] = {r: [] for r in available}
    for c, column in enumerate(columns):
        for resource, amount in column.uses:
            terms[resource].append((c, amount))
    rows = [Row(terms[resource], most) for resource, most in available.items()]
    if max_pipelines is not None:
        rows.append(Row([(c, 1) for c in range(len(columns))], max_pipelines))
    return rows


def least_time_s(
    samples: Callable[[float], float], total: float, high: float, *, within: float
) -> float | None:
    """The least time in which so many samples are done, up to a ratio [s]; None: above ``high``.

    Samples grow nearly in proportion to the time once there is enough of it. So the time is looked
    for just above and just below where the line between the ends of the interval leads.
    """
    most = samples(high)
    if most < total:
        return None
    low = high * _FIRST
    least = samples(low)
    while least >= total:
        high, most, low = low, least, low * _FIRST
        least = samples(low)
    nudge = math.sqrt(within)
    while high / low > within:
        line = low + (high - low) * (total - least) / max(most - least, _NO_SAMPLES)
        half = math.sqrt(low * high)
        for middle in (line * nudge, line / nudge, half):
            if low < middle < high and high / low > within:
                found = samples(middle)
                if found >= total:
                    high, most = middle, found
                else:
                    low, least = middle, found
    return high


def rounded(
    columns: Sequence[Column[Sort]],
    available: Mapping[Resource, int],
    global_batch_size: int,
    max_pipelines: int | None,
) -> list[Sort] | None:
    """Whole pipelines that can do the batch within the columns' time; None: none were found.

    Of all such answers one with about the most samples to spare, since real pipelines are a
    little slower. The answer is checked here against every constraint.
    """
    if not columns:
        return None
    limits = _limits(columns, available, max_pipelines)
    batch = Row([(c, -column.samples) for c, column in enumerate(columns)], -global_batch_size)
    result = solve(
        LinearProgram(
            costs=[column.samples for column in columns],
            rows=[batch, *limits],
            upper=[min(available[r] // n for r, n in column.uses) for column in columns],
            is_integer=True,
        ),
        max_nodes=_MAX_NODES,
        max_gap=_MAX_GAP,
    )
    if not result.has_solution:
        return None
    numbers = [round(v) for v in result.variables]
    chosen = [column.sort for column, n in zip(columns, numbers, strict=True) for _ in range(n)]
    is_valid = (
        sum(c.samples * n for c, n in zip(columns, numbers, strict=True)) >= global_batch_size
        and all(
            sum(dict(c.uses).get(resource, 0) * n for c, n in zip(columns, numbers, strict=True))
            <= most
            for resource, most in available.items()
        )
        and (max_pipelines is None or len(chosen) <= max_pipelines)
    )
    return chosen if is_valid else None


_MAX_NODES = 200
"""Branches of the integer programme: its columns are few and its optimum need not be proved."""
_MAX_GAP = 0.003
"""Gap at which the integer programme ends: more samples to spare than that are not worth it."""
