"""How many pipelines of each family, and what share of the batch each gets: an integer program.

Notation: family c takes u_ck devices of kind k, has micro-batches of b_c samples and finishes at
most m_c of them within the target time T (`capacity.Families.capacity`). n_k devices of kind k,
G samples a batch. Unknown: x_c pipelines of family c, y_c micro-batches in all of them.

    maximize  sum_c b_c m_c x_c            (spare capacity: the real schedule is a little slower)
    subject to  sum_c u_ck x_c <= n_k      for every kind
                sum_c b_c y_c = G,   x_c <= y_c <= m_c x_c,   x, y integers >= 0

Its LP relaxation is the bound of `bounds`: where that is below G, no plan meets T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eth_cli.search.capacity import Families
from eth_cli.search.solver import LinearProgram, Row, SolverResult, solve
from eth_cli.search.templates import Counts


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
    any kind and finishes as much: any plan with the first is a plan with the second. None is left
    out where that rule is off (`pruning`).
    """
    kept: list[Column] = []
    num_dominated = 0
    for b in families.grids:
        capacity = families.capacity(b, time_s)
        if families.problem.pruning.dominated:
            useful = families.space.beats_smaller(capacity)
        else:
            useful = capacity > 0
        num_dominated += int(np.count_nonzero(capacity) - np.count_nonzero(useful))
        kept += [Column(families.vectors[i], b, int(capacity[i])) for i in np.flatnonzero(useful)]
    return kept, num_dominated


def choose(
    found: Sequence[Column], counts: Counts, global_batch_size: int
) -> tuple[SolverResult, list[Chosen] | None]:
    """Pipelines that do the whole batch within the columns' time; None: no solver found any.

    The answer is rounded to integers and checked here against every constraint.
    """
    n = len(found)  # Column c is x_c, column n + c is y_c.
    devices = [
        Row([(i, column.vector[k]) for i, column in enumerate(found) if column.vector[k]], count)
        for k, count in enumerate(counts)
    ]
    samples = [(n + i, column.micro_batch_size) for i, column in enumerate(found)]
    batch = Row(samples, global_batch_size, is_equality=True)
    least = [Row([(i, 1), (n + i, -1)], 0) for i in range(n)]
    most = [Row([(n + i, 1), (i, -c.max_micro_batches)], 0) for i, c in enumerate(found)]
    result = solve(
        LinearProgram(
            costs=[c.max_samples for c in found] + [0] * n,
            rows=[*devices, batch, *least, *most],
            upper=[_most(c.vector, counts) for c in found]
            + [global_batch_size // c.micro_batch_size for c in found],
            is_integer=True,
        )
    )
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
