"""The planner against brute force over the whole space: widths, recomputation, links, placement.

3 instances in ten have up to 6 devices or 8 blocks; the rest is smaller. `make slow` runs 1,000
more of them.
"""

from __future__ import annotations

import pytest
from oracle.brute_force import INFINITE, BruteForce
from oracle.instances import Instance, make_whole_instance
from oracle.memory_check import check_fits

from eth_cli.errors import InfeasibleError
from eth_cli.search.planner import SearchOptions, SearchReport, search
from eth_cli.search.simulate import simulate

NUM_INSTANCES = 300
CHUNK = 30
SIZES = ((4, 5), (4, 6), (3, 7), (6, 4), (4, 6), (3, 8), (4, 5), (5, 6), (4, 6), (6, 5))
"""Devices and blocks at most, by the last digit of the seed."""


def instance(seed: int) -> Instance:
    """The instance of a seed."""
    max_devices, max_blocks = SIZES[seed % 10]
    return make_whole_instance(seed, max_devices=max_devices, max_blocks=max_blocks)


def optimum_s(seed: int, report: SearchReport | None) -> float:
    """By brute force; a plan that is known, and checked here, only makes it quicker [s]."""
    cluster, profile, total = instance(seed)
    known_s = INFINITE
    if report is not None:
        check_fits(report.plan, profile, cluster)
        known_s = simulate(report.plan, profile, cluster).step_time_s
        assert known_s == report.step_time_s
    return BruteForce(
        cluster, profile, total, cutoff_s=known_s, spare_recompute=len(cluster.devices) < 5
    ).run()


def check(first: int, last: int) -> None:
    """Every seed within the range; at least 95 % of those with a plan are equal to the optimum."""
    num_feasible = num_equal = 0
    faults = []
    for seed in range(first, last):
        cluster, profile, total = instance(seed)
        try:
            report = search(profile, cluster, SearchOptions(global_batch_size=total))
        except InfeasibleError:
            if (best_s := optimum_s(seed, None)) < INFINITE:
                faults.append(f"seed {seed}: called infeasible, a plan of {best_s} s exists")
            continue
        best_s = optimum_s(seed, report)
        over = report.step_time_s / best_s - 1
        num_feasible += 1
        num_equal += over <= 1e-9
        if over > 0.005:
            faults.append(f"seed {seed}: {100 * over:.2f} % above the optimum {best_s}")
        if over > 1e-9 and report.status == "optimal":
            faults.append(f"seed {seed}: called optimal, {100 * over:.4f} % above {best_s}")
        if report.bound_s > best_s * (1 + 1e-9):
            faults.append(f"seed {seed}: bound {report.bound_s} is above the optimum {best_s}")
    assert not faults, "\n".join(faults)
    assert num_equal >= 0.95 * num_feasible
    assert num_feasible >= (last - first) // 2


@pytest.mark.parametrize("first", range(0, NUM_INSTANCES, CHUNK))
def test_plan_is_the_optimum_of_the_whole_space(first: int) -> None:
    check(first, first + CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 2_000, 50))
def test_plan_is_the_optimum_on_1000_more(first: int) -> None:
    check(first, first + 50)


def test_instances_use_the_whole_space() -> None:
    """Widths, recomputation, three types and odd nodes all matter, so the oracle can tell."""
    wide = recomputed = three = 0
    for seed in range(120):
        cluster, profile, total = make_whole_instance(seed)
        brute = BruteForce(cluster, profile, total)
        if brute.run() == INFINITE:
            continue
        assert brute.best is not None
        stages = [stage for pipeline in brute.best for stage in pipeline.stages]
        wide += any(len(stage.devices) > 1 for stage in stages)
        recomputed += any(stage.recompute for stage in stages)
        three += len(cluster.device_types) == 3
    assert min(wide, recomputed, three) >= 8, (wide, recomputed, three)


def test_a_cutoff_changes_nothing_but_the_time_taken() -> None:
    for seed in range(30):
        cluster, profile, total = make_whole_instance(seed, max_devices=3)
        best_s = BruteForce(cluster, profile, total).run()
        if best_s < INFINITE:
            again = BruteForce(cluster, profile, total, cutoff_s=best_s * 1.001).run()
            assert again == pytest.approx(best_s, rel=1e-12)
