"""Which families of pipelines a search works with: all of them, or what a large cluster allows.

Where all count vectors are few enough, one space covers every possible pipeline, and with it comes
a bound on every plan. Else pipelines of one kind are covered as far as possible, and mixed ones up
to a length; the bound is then that of the work alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eth_cli.search.bounds import family_bound_s, work_bound_s
from eth_cli.search.capacity import CountSpace, Families, num_vectors, steps_of
from eth_cli.search.templates import Problem

_FAMILY_OPERATIONS = 1e8
"""Elements of the family programme's tables, over all micro-batch numbers, that are worth it."""
_GRID = 48
"""Numbers of micro-batches, per micro-batch size, that families are computed for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilySet:
    """Families that a search works with."""

    parts: tuple[Families, ...]
    is_complete: bool
    """Whether every possible pipeline belongs to a family of the first part."""
    bound_s: float
    """No plan has a smaller step time [s]."""


def choose_families(problem: Problem) -> FamilySet:
    """All families where they are few enough, else none, and the bound that is left."""
    every = tuple(range(len(problem.kinds)))
    bound_s = work_bound_s(problem)
    if _num_operations(problem, every, problem.max_stages) <= _FAMILY_OPERATIONS:
        space = CountSpace(problem.counts, problem.max_stages, steps_of(problem))
        families = Families(problem, space, max_grid=_GRID)
        bound_s = max(bound_s, family_bound_s(problem, families))
        return FamilySet(parts=(families,), is_complete=True, bound_s=bound_s)
    return FamilySet(parts=(), is_complete=False, bound_s=bound_s)


def _num_operations(problem: Problem, kinds: Sequence[int], max_stages: int) -> float:
    """Elements of the family programme's tables over all of its runs."""
    counts = [problem.counts[k] for k in kinds]
    runs = sum(min(_GRID, problem.global_batch_size // b) for b in problem.micro_batch_sizes)
    cells = float((problem.num_blocks + 1) ** 2)
    # A vector of wide groups is in one level for every number of stages that it may be.
    widest = max((o.tensor_parallel for o in problem.options), default=1)
    options = sum(o.kind in kinds for o in problem.options)
    levels = 1 if widest == 1 else max_stages
    return num_vectors(counts, max_stages * widest) * levels * options * cells * runs
