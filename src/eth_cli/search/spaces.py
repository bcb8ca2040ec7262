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
from eth_cli.search.templates import Counts, Problem

_FAMILY_OPERATIONS = 4e8
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
    """All families where they are few enough, else those of short or of unmixed pipelines."""
    every = tuple(range(len(problem.kinds)))
    bound_s = work_bound_s(problem)
    if _num_operations(problem, every, problem.max_stages) <= _FAMILY_OPERATIONS:
        space = CountSpace(problem.counts, problem.max_stages, steps_of(problem))
        families = Families(problem, space, max_grid=_GRID)
        bound_s = max(bound_s, family_bound_s(problem, families))
        return FamilySet(parts=(families,), is_complete=True, bound_s=bound_s)
    subsets = [every, *((k,) for k in every if len(every) > 1)]
    share = _FAMILY_OPERATIONS / len(subsets)
    parts = [
        Families(
            problem,
            CountSpace(
                _only(problem, kinds), _longest_within(problem, kinds, share), steps_of(problem)
            ),
            max_grid=_GRID // 2,
        )
        for kinds in subsets
    ]
    return FamilySet(parts=tuple(parts), is_complete=False, bound_s=bound_s)


def _only(problem: Problem, kinds: Sequence[int]) -> Counts:
    """Devices of some kinds, none of the others."""
    return tuple(n if k in kinds else 0 for k, n in enumerate(problem.counts))


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


def _longest_within(problem: Problem, kinds: Sequence[int], operations: float) -> int:
    """Most stages with which the families of some kinds are still few enough."""
    longest = 1
    while (
        longest < problem.max_stages and _num_operations(problem, kinds, longest + 1) <= operations
    ):
        longest += 1
    return longest
