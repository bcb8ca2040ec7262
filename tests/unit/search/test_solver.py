"""The solver door: quiet, honest about how a solve ended; PuLP's CBC as the independent check."""

from __future__ import annotations

import random
import subprocess
import sys

import pulp
import pytest

from eth_cli.search import solver
from eth_cli.search.solver import Limits, LinearProgram, Row, Solver, SolverResult, Status, solve

NO_LIMITS = Limits(2_000, None)


def _knapsack(*more: Row, size: int = 3) -> LinearProgram:
    return LinearProgram(
        costs=[i + 3 for i in range(size)],
        rows=[Row([(i, i + 2) for i in range(size)], size + 2), *more],
        upper=[1] * size,
        is_integer=True,
    )


@pytest.mark.parametrize("one", solver.SOLVERS)
def test_every_solver_solves(one: Solver) -> None:
    result = solve(_knapsack(), solvers=[one])
    assert result.status is Status.OPTIMAL
    assert result.value == result.bound == 7
    assert [round(v) for v in result.variables] == [1, 1, 0]
    assert result.duals == ()


@pytest.mark.parametrize("one", solver.SOLVERS)
def test_duals_are_what_one_more_of_a_limit_is_worth(one: Solver) -> None:
    # Worked by hand: max 3x + 5y, x <= 4, 2y <= 12, 3x + 2y <= 18 has its optimum at (2, 6).
    program = LinearProgram(
        costs=[3, 5], rows=[Row([(0, 1)], 4), Row([(1, 2)], 12), Row([(0, 3), (1, 2)], 18)]
    )
    result = solve(program, solvers=[one])
    assert result.value == result.bound == pytest.approx(36)
    assert result.variables == pytest.approx((2, 6))
    assert result.duals == pytest.approx((0, 1.5, 1))


@pytest.mark.parametrize("one", solver.SOLVERS)
def test_equalities_and_minima(one: Solver) -> None:
    program = LinearProgram(
        costs=[2, 3],
        rows=[Row([(0, 1), (1, 1)], 10, is_equality=True)],
        upper=[7, 20],
        is_maximum=False,
    )
    result = solve(program, solvers=[one])
    assert result.variables == pytest.approx((7, 3))
    assert result.value == pytest.approx(23)


@pytest.mark.parametrize("one", solver.SOLVERS)
def test_infeasible_is_infeasible(one: Solver) -> None:
    program = _knapsack(Row([(0, -1), (1, -1)], -3))
    assert solve(program, solvers=[one]).status is Status.INFEASIBLE
    assert solve(program).status is Status.INFEASIBLE


def test_the_same_program_gives_the_same_answer() -> None:
    program = _random_program(random.Random(5), is_integer=False)
    first = solve(program)
    for seed in range(20):
        solve(_random_program(random.Random(seed), is_integer=seed % 2 == 0))
        assert solve(program) == first


def test_a_program_without_rows_and_one_without_columns() -> None:
    assert solve(LinearProgram(costs=[2], rows=[], upper=[3])).value == 6
    nothing = LinearProgram(costs=[], rows=[Row([], 1, is_equality=True)])
    assert not solve(nothing).has_solution


def test_stdout_stays_clean() -> None:
    code = (
        "from eth_cli.search.solver import *\n"
        "p = LinearProgram(costs=[1], rows=[Row([(0, 2)], 7)], upper=[4], is_integer=True)\n"
        "for solver in SOLVERS: assert solve(p, solvers=[solver]).value == 3\n"
        "print('clean')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "clean\n"
    assert done.stderr == ""


def test_without_highs_cbc_answers() -> None:
    code = (
        "import sys; sys.modules['highspy'] = None\n"
        "from eth_cli.search.solver import *\n"
        "p = LinearProgram(costs=[1], rows=[Row([(0, 2)], 7)], upper=[4], is_integer=True)\n"
        "result = solve(p); print(result.solver, result.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "CBC 3.0\n"


def _random_program(rng: random.Random, *, is_integer: bool) -> LinearProgram:
    """A program with a solution: its rows leave room for one that was drawn first."""
    num_columns = rng.randint(1, 12)
    hidden = [rng.randint(0, 5) for _ in range(num_columns)]
    rows = []
    for _ in range(rng.randint(1, 6)):
        columns = sorted(rng.sample(range(num_columns), rng.randint(1, num_columns)))
        terms = [(c, rng.randint(-3, 9)) for c in columns]
        at = sum(value * hidden[c] for c, value in terms)
        is_equality = rng.random() < 0.2
        rows.append(Row(terms, at if is_equality else at + rng.randint(0, 4), is_equality))
    return LinearProgram(
        costs=[rng.randint(-5, 20) for _ in range(num_columns)],
        rows=rows,
        upper=[10] * num_columns,
        is_integer=is_integer,
        is_maximum=rng.random() < 0.6,
    )


def test_case_49_what_has_a_solution_is_never_infeasible_and_solvers_agree() -> None:
    rng = random.Random(49)
    for number in range(200):
        program = _random_program(rng, is_integer=number % 2 == 0)
        found = [one(program, NO_LIMITS) for one in solver.SOLVERS[:2]]
        if number % 10 < 2:  # CBC is a process of its own each time.
            found.append(solver.SOLVERS[2](program, NO_LIMITS))
        for result in found:
            assert result.status is Status.OPTIMAL
            assert result.value == pytest.approx(found[0].value, rel=2e-4, abs=1e-6)
            _check(program, result)


def _check(program: LinearProgram, result: SolverResult) -> None:
    """Every constraint, the objective and the side that the bound lies on, in plain Python."""
    x = result.variables
    assert len(x) == len(program.costs)
    assert all(-1e-6 <= v <= 10 + 1e-6 for v in x)
    for row in program.rows:
        total = sum(value * x[column] for column, value in row.terms)
        assert total <= row.limit + 1e-5
        assert total >= row.limit - 1e-5 or not row.is_equality
    value = sum(cost * v for cost, v in zip(program.costs, x, strict=True))
    assert result.value == pytest.approx(value, abs=1e-6)
    assert result.bound is not None
    slack = result.bound - value if program.is_maximum else value - result.bound
    assert slack >= -1e-6 * (1 + abs(value))


def _says(status: Status, value: float | None = None) -> Solver:
    """A solver that ends as told."""
    return lambda program, limits: SolverResult(status=status, value=value, solver="fake")


def test_case_49_cut_short_is_not_optimal() -> None:
    # A knapsack that takes CBC and HiGHS more than a node, cut at the first.
    rng = random.Random(2)
    weights = [rng.randint(900, 1_100) * 2 for _ in range(40)]
    program = LinearProgram(
        costs=[w + rng.randint(-50, 50) for w in weights],
        rows=[Row(list(enumerate(weights)), sum(weights) // 2 + 1 - sum(weights) // 2 % 2)],
        upper=[1] * 40,
        is_integer=True,
    )
    for one in solver.SOLVERS:
        result = one(program, Limits(0, None))
        assert result.status in (Status.FEASIBLE, Status.UNKNOWN)
        assert result.bound is None


def test_case_49_cbc_that_says_optimal_when_it_was_cut_short_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[tuple[int, float | None]] = [
        (pulp.LpSolutionIntegerFeasible, 1.0),
        (pulp.LpSolutionNoSolutionFound, None),
    ]

    def ended(problem: pulp.LpProblem, *_: object) -> int:
        sol_status, value = ends.pop(0)
        for variable in problem.variables():
            variable.varValue = value
        problem.assignStatus(pulp.LpStatusOptimal, sol_status)
        return int(pulp.LpStatusOptimal)

    monkeypatch.setattr(pulp.LpProblem, "solve", ended)
    cbc = solver.SOLVERS[2]
    result = cbc(_knapsack(), NO_LIMITS)
    assert (result.status, result.value, result.bound) == (Status.FEASIBLE, 12, None)
    assert cbc(_knapsack(), NO_LIMITS).status is Status.UNKNOWN


def test_case_49_without_an_answer_the_next_solver_is_asked() -> None:
    liar = _says(Status.UNKNOWN)
    assert solve(_knapsack(), solvers=[liar]).status is Status.UNKNOWN
    assert solve(_knapsack(), solvers=[liar, *solver.SOLVERS]).value == 7


def test_case_49_a_false_infeasible_is_asked_of_the_next_solver() -> None:
    liar = _says(Status.INFEASIBLE)
    assert solve(_knapsack(), solvers=[liar, *solver.SOLVERS]).value == 7
    # Two that agree are believed; one whose answer nobody repeats is not, nor the other way round.
    assert solve(_knapsack(), solvers=[liar, liar, *solver.SOLVERS]).status is Status.INFEASIBLE
    unsure = _says(Status.UNKNOWN)
    assert solve(_knapsack(), solvers=[liar, unsure, *solver.SOLVERS]).value == 7
