"""Whether a search can work with all families of pipelines, and the bound that they give.

Where all count vectors are few enough, one space covers every possible pipeline, and with it comes
a bound on every plan. Else there are no families, and the bound is that of the work alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from eth_cli.search.bounds import family_bound_s, work_bound_s
from eth_cli.search.capacity import CountSpace, Families, num_vectors, steps_of
from eth_cli.search.templates import Problem, SearchOverError

_FAMILY_OPERATIONS = 1e8
"""Elements of the family programme's tables, over all micro-batch numbers, that are worth it."""
_GRID = 48
"""Numbers of micro-batches, per micro-batch size, that families are computed for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilySet:
    """What is known of all families of a problem."""

    families: Families | None
    """All of them; None: they are too many, or time was over."""
    bound_s: float
    """No plan has a smaller step time [s]."""


def all_families(problem: Problem, *, max_operations: float = _FAMILY_OPERATIONS) -> FamilySet:
    """All families where they and the time are enough, else none, and the bound that is left."""
    bound_s = work_bound_s(problem)
    if _num_operations(problem) > max_operations:
        return FamilySet(families=None, bound_s=bound_s)
    space = CountSpace(problem.counts, problem.max_stages, steps_of(problem))
    try:
        families = Families(problem, space, max_grid=_GRID)
    except SearchOverError:
        return FamilySet(families=None, bound_s=bound_s)
    return FamilySet(families=families, bound_s=max(bound_s, family_bound_s(problem, families)))


def _num_operations(problem: Problem) -> float:
    """Elements of the family programme's tables over all of its runs."""
    runs = sum(min(_GRID, problem.global_batch_size // b) for b in problem.micro_batch_sizes)
    cells = float((problem.num_blocks + 1) ** 2)
    # A vector of wide groups is in one level for every number of stages that it may be.
    widest = max((o.tensor_parallel for o in problem.options), default=1)
    levels = 1 if widest == 1 else problem.max_stages
    vectors = num_vectors(problem.counts, problem.max_stages * widest)
    return vectors * levels * len(problem.options) * cells * runs
