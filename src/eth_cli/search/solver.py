"""The only place that talks to PuLP: quiet, with honest outcomes.

HiGHS (through highspy) by default, CBC where that is absent or fails. Traps that are handled here:
HiGHS prints a banner when an instance is made; a solver that was cut short reports
``LpStatusOptimal`` and only ``sol_status`` says the truth; PuLP knows no name for some of HiGHS's
ways to stop early. Solver answers are floating-point: callers re-check them in plain Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pulp


class Status(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """Solved to the end."""
    FEASIBLE = "feasible"
    """Stopped early with a solution that need not be the best."""
    INFEASIBLE = "infeasible"
    """Proved to have no solution."""
    UNKNOWN = "unknown"
    """Stopped early or failed without a solution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverResult:
    """Outcome of one solve."""

    status: Status
    value: float | None = None
    """Objective of the solution."""
    bound: float | None = None
    """No solution is better than this; known only of a solve that went to its end."""
    variables: tuple[float, ...] = ()
    """The solution, in the order of the variables given."""
    solver: str = ""
    """Name of the solver that answered."""

    @property
    def has_solution(self) -> bool:
        """Whether there is a solution."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


@contextmanager
def _no_banner() -> Iterator[None]:
    """Send what C code writes to stdout nowhere, for as long as a HiGHS instance takes to make."""
    saved = os.dup(1)
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


class _QuietHiGHS(pulp.HiGHS):  # type: ignore[misc] # PuLP has no types
    """HiGHS without its banner, and with an answer when it stops at a limit PuLP does not know."""

    def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802 # PuLP's name
        with _no_banner():
            super().createAndConfigureSolver(lp)

    def findSolutionValues(self, lp: Any) -> tuple[int, int]:  # noqa: N802 # PuLP's name
        try:
            status, sol_status = super().findSolutionValues(lp)
        except KeyError:
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
        return status, sol_status


def _solvers(max_nodes: int, max_gap: float | None = None) -> list[Any]:
    found: list[Any] = []
    # One thread and a limit in nodes, not seconds: the same inputs give the same answer.
    highs = _QuietHiGHS(
        msg=False, threads=1, random_seed=0, mip_max_nodes=max_nodes, gapRel=max_gap
    )
    if highs.available():
        found.append(highs)
    with suppress(pulp.PulpSolverError, AttributeError):
        cbc = pulp.PULP_CBC_CMD(msg=False, threads=1, maxNodes=max_nodes, gapRel=max_gap)
        if cbc.available():
            found.append(cbc)
    return found


def solve(
    problem: pulp.LpProblem,
    variables: Sequence[pulp.LpVariable],
    *,
    max_nodes: int = 2_000,
    max_gap: float | None = None,
    solvers: Sequence[Any] | None = None,
) -> SolverResult:
    """Solve with the first solver that gives an answer one can trust.

    Args:
        max_nodes: branches after which an integer programme ends with the best found.
        max_gap: relative gap at which it may end, too; its ``bound`` is then not to be used.

    An ``infeasible`` of one solver is asked of the next one too, for solvers have been wrong.
    """
    last = SolverResult(status=Status.UNKNOWN)
    for solver in _solvers(max_nodes, max_gap) if solvers is None else solvers:
        try:
            problem.solve(solver)
        except pulp.PulpSolverError:
            continue
        last = _outcome(problem, variables, solver.name)
        if last.has_solution:
            return last
    return last


def _outcome(
    problem: pulp.LpProblem, variables: Sequence[pulp.LpVariable], name: str
) -> SolverResult:
    if problem.status == pulp.LpStatusInfeasible:
        return SolverResult(status=Status.INFEASIBLE, solver=name)
    values = tuple(v.varValue for v in variables)
    solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if problem.status != pulp.LpStatusOptimal or not solved or None in values:
        return SolverResult(status=Status.UNKNOWN, solver=name)
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    value = float(pulp.value(problem.objective))
    return SolverResult(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        value=value,
        bound=value if optimal else None,
        variables=values,
        solver=name,
    )
