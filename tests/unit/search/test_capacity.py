"""Families of templates: bounds below every template, cuts that attain them, bounds of plans."""

from __future__ import annotations

import itertools
import random

import pytest
from unit.search.problems import cluster_of, profile_of

from eth_cli.search.assign import Chosen, Column, choose, columns
from eth_cli.search.bounds import best_capacity, best_capacity_lp
from eth_cli.search.capacity import CountSpace, Families, micro_batch_grid, num_vectors
from eth_cli.search.cost import CostModel
from eth_cli.search.solver import Status
from eth_cli.search.templates import Kind, Problem, Template, TemplateStage


def _problem(seed: int, num_blocks: int = 5, total: int = 6) -> Problem:
    rng = random.Random(seed)
    profile = profile_of(
        blocks={
            t: [(rng.uniform(1, 3) * slow, rng.uniform(2, 5) * slow) for _ in range(num_blocks)]
            for t, slow in (("x", 1.0), ("y", 2.2))
        },
        activations=[rng.randint(5_000, 40_000) for _ in range(num_blocks)],
        micro_batch_sizes=(1, 2),
        boundary_bytes=rng.choice([0, 30_000_000]),
        optimizer_s_per_parameter=2e-5,
    )
    memory = {"x": rng.choice([90_000, 180_000, 10**9]), "y": rng.choice([210_000, 10**9])}
    cluster = cluster_of({"x": 2}, {"y": 2}, memory=memory)
    return Problem(
        CostModel(profile, cluster),
        kinds=[Kind("x", 2, memory["x"]), Kind("y", 2, memory["y"])],
        micro_batch_sizes=(1, 2),
        global_batch_size=total,
    )


def _all_templates(problem: Problem, size: int) -> list[Template]:
    found = []
    for length in range(1, min(4, problem.num_blocks) + 1):
        for kinds in itertools.product((0, 1), repeat=length):
            if kinds.count(0) > 2 or kinds.count(1) > 2:
                continue
            for inner in itertools.combinations(range(1, problem.num_blocks), length - 1):
                edges = (0, *inner, problem.num_blocks)
                found.append(
                    Template(
                        size,
                        tuple(
                            TemplateStage(k, a, b)
                            for k, (a, b) in zip(kinds, itertools.pairwise(edges), strict=True)
                        ),
                    )
                )
    return found


@pytest.mark.parametrize("seed", range(6))
def test_bound_is_below_every_template_of_the_family(seed: int) -> None:
    problem = _problem(seed)
    space = CountSpace(problem.counts, problem.max_stages)
    assert len(space.vectors) == num_vectors((2, 2), 4) == 8
    families = Families(problem, space, max_grid=99)
    tight = 0
    for size in (1, 2):
        for template in _all_templates(problem, size):
            index = space.vectors.index(template.counts(2))
            most = problem.max_micro_batches(template)
            for g, m in enumerate(families.grids[size]):
                bound = families.times_s[size][g][index]
                if m <= most:
                    time_s = problem.time_s(template, m) + problem.optimizer_s(template)
                    assert bound <= time_s * (1 + 1e-12)
                    tight += bound >= time_s * (1 - 1e-9)
    assert tight >= 4


@pytest.mark.parametrize("seed", range(6))
def test_template_of_a_family_attains_the_bound_or_comes_close(seed: int) -> None:
    problem = _problem(seed)
    families = Families(problem, CountSpace(problem.counts, 4), max_grid=99)
    for size, grid in families.grids.items():
        for g, m in enumerate(grid):
            for index, vector in enumerate(families.vectors):
                template = families.template(vector, size, m)
                if template is None:
                    assert families.times_s[size][g][index] == float("inf")
                    continue
                assert template.counts(2) == vector
                assert m <= problem.max_micro_batches(template)
                assert [s.start for s in template.stages[1:]] == [
                    s.stop for s in template.stages[:-1]
                ]
                time_s = problem.time_s(template, m)
                assert time_s <= 1.5 * families.times_s[size][g][index]


def test_grid_has_every_number_or_grows_in_proportion() -> None:
    assert micro_batch_grid(5, 8) == (1, 2, 3, 4, 5)
    grid = micro_batch_grid(1_000, 20)
    assert grid[:10] == tuple(range(1, 11))
    assert grid[-1] == 1_000
    assert 12 < len(grid) <= 20


def test_capacity_between_grid_points_is_never_too_small() -> None:
    problem = _problem(3, total=60)
    exact = Families(problem, CountSpace(problem.counts, 4), max_grid=99)
    coarse = Families(problem, CountSpace(problem.counts, 4), max_grid=8)
    for time_s in exact.candidate_times_s()[::17]:
        for size in (1, 2):
            assert (coarse.capacity(size, time_s) >= exact.capacity(size, time_s)).all()


def test_columns_leave_out_what_another_does_with_fewer_devices() -> None:
    problem = _problem(0)
    families = Families(problem, CountSpace(problem.counts, 4), max_grid=99)
    time_s = float(families.candidate_times_s()[-1])
    kept, num_dominated = columns(families, time_s)
    assert num_dominated > 0
    for a, b in itertools.permutations(kept, 2):
        same = a.micro_batch_size == b.micro_batch_size
        fewer = all(x <= y for x, y in zip(a.vector, b.vector, strict=True))
        assert not (same and fewer and a.max_micro_batches >= b.max_micro_batches)


def test_choose_meets_every_constraint_and_finds_the_only_way() -> None:
    found = [Column((1, 0), 2, 3), Column((0, 1), 2, 1), Column((1, 1), 3, 3)]
    result, chosen = choose(found, (2, 2), 17)
    # 17 is odd: one 3 x 3 (or 3 x 1) and the rest in twos on what is left.
    assert result.status is Status.OPTIMAL
    assert chosen is not None
    assert sum(c.micro_batches * c.micro_batch_size for c in chosen) == 17
    assert Chosen((1, 1), 3, 3) in chosen
    result, chosen = choose(found, (2, 2), 19)
    assert (result.status, chosen) == (Status.INFEASIBLE, None)


def test_capacity_by_lp_is_above_that_of_whole_pipelines() -> None:
    found = [Column((2, 0), 1, 5), Column((0, 2), 1, 2), Column((1, 1), 1, 4)]
    whole = best_capacity(found, (3, 2))
    assert (whole[2, 2], whole[3, 1], whole[3, 2], whole[2, 1]) == (8, 9, 9, 5)
    # Halves of (2, 0) and (1, 1) more: 5 x 3/4 + 4 x 3/2, by the LP's own optimum.
    assert best_capacity_lp(found, (3, 2)) >= 9.5
