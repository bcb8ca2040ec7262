"""The only place that talks to solvers: quiet, with honest outcomes.

A `LinearProgram` goes to HiGHS as it is, through highspy; where that is absent or has no answer,
PuLP hands it to CBC. PuLP's own way to HiGHS takes twice as long for programs of the planner's
size, and loading PuLP as long as dozens of them; so it is loaded only when it is asked.

Traps that are handled here: HiGHS prints a banner when an instance is made; solvers call a program
infeasible that is not; under CBC a solve that was cut short ends as ``LpStatusOptimal`` and only
``sol_status`` says the truth. Solver answers are floating-point: callers re-check them in plain
Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from math import inf
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A constraint: the sum of coefficient x column is at most the limit, or equal to it."""

    terms: Sequence[tuple[int, float]]
    """(column, coefficient); no column stands twice."""
    limit: float
    is_equality: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearProgram:
    """``max costs x`` (or min) with ``0 <= x <= upper`` and rows that limit what x adds up to."""

    costs: Sequence[float]
    """Objective, a coefficient a column."""
    rows: Sequence[Row]
    upper: Sequence[float] | None = None
    """Largest value of each column; None: no limit on any."""
    is_integer: bool = False
    """Whether all columns are whole numbers."""
    is_maximum: bool = True
    """Whether the objective is to be large."""


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
    """The solution, a value a column."""
    duals: tuple[float, ...] = ()
    """Of a linear program: what one more of each row's limit changes the objective by, without
    its sign, which depends on the solver."""
    solver: str = ""
    """Name of the solver that answered."""

    @property
    def has_solution(self) -> bool:
        """Whether there is a solution."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


class Limits(NamedTuple):
    """When an integer program may end early. In nodes, not seconds: answers do not vary."""

    max_nodes: int
    max_gap: float | None


Solver = Callable[[LinearProgram, Limits], SolverResult]

_UNKNOWN = SolverResult(status=Status.UNKNOWN)


def solve(
    program: LinearProgram,
    *,
    max_nodes: int = 2_000,
    max_gap: float | None = None,
    solvers: Sequence[Solver] | None = None,
) -> SolverResult:
    """Solve with the first solver that gives an answer one can trust.

    Args:
        max_nodes: branches after which an integer program ends with the best found.
        max_gap: relative gap at which it may end, too.

    An ``infeasible`` of one solver is asked of the next one too, for solvers have been wrong; two
    that say so are believed.
    """
    last = _UNKNOWN
    for solver in SOLVERS if solvers is None else solvers:
        found = solver(program, Limits(max_nodes, max_gap))
        if found.has_solution:
            return found
        if found.status is last.status is Status.INFEASIBLE:
            return found
        last = found
    return last


# --- HiGHS ------------------------------------------------------------------------------------


def _highs(program: LinearProgram, limits: Limits) -> SolverResult:
    # A linear program of the planner's size is solved faster than presolve looks through it.
    return _run_highs(program, limits, presolve=program.is_integer)


def _highs_again(program: LinearProgram, limits: Limits) -> SolverResult:
    """The other way: presolve is where most of what solvers get wrong comes from."""
    return _run_highs(program, limits, presolve=not program.is_integer)


def _run_highs(program: LinearProgram, limits: Limits, *, presolve: bool) -> SolverResult:
    try:
        highspy: Any = import_module("highspy")  # Only some of its versions have types.
    except ImportError:
        return _UNKNOWN
    with _no_banner():
        highs = highspy.Highs()
    # An instance and a thread of its own for each solve: the same program gives the same answer.
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("presolve", "on" if presolve else "off")
    highs.setOptionValue("mip_max_nodes", limits.max_nodes)
    if limits.max_gap is not None:
        highs.setOptionValue("mip_rel_gap", limits.max_gap)

    num_columns = len(program.costs)
    model = highspy.HighsLp()
    model.num_col_ = num_columns
    model.num_row_ = len(program.rows)
    model.sense_ = highspy.ObjSense.kMaximize if program.is_maximum else highspy.ObjSense.kMinimize
    model.col_cost_ = program.costs
    model.col_lower_ = [0.0] * num_columns
    model.col_upper_ = [inf] * num_columns if program.upper is None else program.upper
    model.row_lower_ = [row.limit if row.is_equality else -inf for row in program.rows]
    model.row_upper_ = [row.limit for row in program.rows]
    if program.is_integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    starts, columns, values = [0], [], []
    for row in program.rows:
        columns += [column for column, _ in row.terms]
        values += [value for _, value in row.terms]
        starts.append(len(columns))
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = starts, columns, values
    error = highspy.HighsStatus.kError
    if highs.passModel(model) == error or highs.run() == error:
        return _UNKNOWN

    status, info = highs.getModelStatus(), highs.getInfo()
    no_solution = (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    )
    if status in no_solution:
        return SolverResult(status=Status.INFEASIBLE, solver="HiGHS")
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return _UNKNOWN
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    solution, value = highs.getSolution(), info.objective_function_value
    bound = info.mip_dual_bound if program.is_integer else value
    return SolverResult(
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
        value=value,
        bound=bound if is_optimal else None,
        variables=tuple(solution.col_value),
        duals=() if program.is_integer else tuple(map(abs, solution.row_dual)),
        solver="HiGHS",
    )


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


# --- CBC, by PuLP -----------------------------------------------------------------------------


def _cbc(program: LinearProgram, limits: Limits) -> SolverResult:
    import pulp

    problem = pulp.LpProblem("p", pulp.LpMaximize if program.is_maximum else pulp.LpMinimize)
    upper: Sequence[float | None] = program.upper or [None] * len(program.costs)
    category = pulp.LpInteger if program.is_integer else pulp.LpContinuous
    x = [pulp.LpVariable(f"x{i}", 0, most, category) for i, most in enumerate(upper)]
    problem += pulp.LpAffineExpression(list(zip(x, program.costs, strict=True)))
    constraints = []
    for i, row in enumerate(program.rows):
        total = pulp.LpAffineExpression([(x[column], value) for column, value in row.terms])
        constraints.append(total == row.limit if row.is_equality else total <= row.limit)
        problem.addConstraint(constraints[i], f"r{i}")
    try:
        problem.solve(
            pulp.PULP_CBC_CMD(
                msg=False, threads=1, maxNodes=limits.max_nodes, gapRel=limits.max_gap
            )
        )
    except (pulp.PulpSolverError, AttributeError):  # absent, or cannot be run
        return _UNKNOWN
    if problem.status == pulp.LpStatusInfeasible:
        return SolverResult(status=Status.INFEASIBLE, solver="CBC")
    values = tuple(v.varValue for v in x)
    is_solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if problem.status != pulp.LpStatusOptimal or not is_solved or None in values:
        return _UNKNOWN
    is_optimal = problem.sol_status == pulp.LpSolutionOptimal
    value = sum(cost * v for cost, v in zip(program.costs, values, strict=True))
    return SolverResult(
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
        value=value,
        bound=value if is_optimal and limits.max_gap is None else None,
        variables=values,
        duals=() if program.is_integer else tuple(abs(c.pi or 0.0) for c in constraints),
        solver="CBC",
    )


SOLVERS: tuple[Solver, ...] = (_highs, _highs_again, _cbc)
"""In the order in which they are asked."""
