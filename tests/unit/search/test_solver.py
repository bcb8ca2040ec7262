"""The solver door: quiet, honest about how a solve ended."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pulp
import pytest

from eth_cli.search import solver
from eth_cli.search.solver import Status, solve


def _knapsack(size: int = 3) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    x = [pulp.LpVariable(f"x{i}", 0, 1, cat="Integer") for i in range(size)]
    problem += pulp.lpSum((i + 3) * v for i, v in enumerate(x))
    problem += pulp.lpSum((i + 2) * v for i, v in enumerate(x)) <= size + 2
    return problem, x


@pytest.mark.parametrize("position", [0, 1])
def test_both_solvers_solve(position: int) -> None:
    problem, x = _knapsack()
    one = solver._solvers(100)[position]
    result = solve(problem, x, solvers=[one])
    assert result.status is Status.OPTIMAL
    assert result.value == result.bound == 7
    assert [round(v) for v in result.variables] == [1, 1, 0]


def test_infeasible_is_infeasible() -> None:
    problem, x = _knapsack()
    problem += x[0] + x[1] >= 3
    assert solve(problem, x).status is Status.INFEASIBLE


def test_stdout_stays_clean() -> None:
    code = (
        "import pulp; from eth_cli.search.solver import solve\n"
        "p = pulp.LpProblem('p', pulp.LpMaximize); x = pulp.LpVariable('x', 0, 4, cat='Integer')\n"
        "p += x; p += 2 * x <= 7\n"
        "assert solve(p, [x]).value == 3\n"
        "print('clean')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "clean\n"
    assert done.stderr == ""


class _Fake:
    """A solver that ends as told."""

    name = "fake"

    def __init__(self, status: int, sol_status: int, value: float | None) -> None:
        self.ends = (status, sol_status, value)

    def actualSolve(self, problem: Any, **_: Any) -> int:  # noqa: N802 # PuLP's name
        status, sol_status, value = self.ends
        for variable in problem.variables():
            variable.varValue = value
        problem.assignStatus(status, sol_status)
        return status


def test_case_49_cut_short_is_not_optimal() -> None:
    problem, x = _knapsack()
    short = _Fake(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible, 1.0)
    result = solve(problem, x, solvers=[short])
    assert result.status is Status.FEASIBLE
    assert result.bound is None


def test_case_49_optimal_without_a_solution_is_unknown_and_the_next_solver_is_asked() -> None:
    problem, x = _knapsack()
    liar = _Fake(pulp.LpStatusOptimal, pulp.LpSolutionNoSolutionFound, None)
    assert solve(problem, x, solvers=[liar]).status is Status.UNKNOWN
    result = solve(problem, x, solvers=[liar, *solver._solvers(100)])
    assert result.status is Status.OPTIMAL


def test_case_49_a_false_infeasible_is_asked_of_the_next_solver() -> None:
    problem, x = _knapsack()
    liar = _Fake(pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible, 0.0)
    assert solve(problem, x, solvers=[liar, *solver._solvers(100)]).value == 7
