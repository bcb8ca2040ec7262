"""Plans of random clusters: they fit, one percent less memory tells, and baselines do not win."""

from __future__ import annotations

import pytest
from oracle.memory_check import check_fits, peak_bytes

from benchmarks.clusters import Instance, random_problem
from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.simulate import simulate

BUDGET = 2_000
"""Candidates of the exhaustive search: these tests are of plans, not of proofs."""


def plan_of(problem: Instance, strategy: str = "hpp") -> Plan | None:
    """The plan of a strategy; None: it has none."""
    cluster, profile, total = problem
    options = SearchOptions(global_batch_size=total, strategy=strategy, budget=BUDGET)
    try:
        return search(profile, cluster, options).plan
    except InfeasibleError:
        return None


def check_memory(first: int, last: int) -> None:
    """No device is above its capacity, by the tests' own formula and by the plan's prediction."""
    num_plans = 0
    for seed in range(first, last):
        cluster, profile, total = random_problem(seed, max_devices=12)
        plan = plan_of((cluster, profile, total))
        if plan is None:
            continue
        num_plans += 1
        check_fits(plan, profile, cluster)
        assert plan.predicted is not None
        told = {m.device: m.bytes for m in plan.predicted.memory}
        assert told == peak_bytes(plan, profile, cluster), f"seed {seed}"
        used = {d for p in plan.pipelines for s in p.stages for d in s.devices}
        assert used | {u.device for u in plan.unused_devices} == set(cluster.devices)
    assert num_plans >= (last - first) * 0.6


@pytest.mark.parametrize("first", [0, 20])
def test_case_36_no_device_is_above_its_memory(first: int) -> None:
    check_memory(first, first + 20)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1_000, 50))
def test_case_36_no_device_is_above_its_memory_on_1000_clusters(first: int) -> None:
    check_memory(first, first + 50)


def with_less(cluster: Cluster, plan: Plan, profile: Profile) -> Cluster:
    """The cluster, every type's memory 1 % below what the plan needs of it at most."""
    needed: dict[str, int] = {}
    for device, num_bytes in peak_bytes(plan, profile, cluster).items():
        name = cluster.devices[device].type
        needed[name] = max(needed.get(name, 0), num_bytes)
    types = {
        name: known.model_copy(update={"memory_bytes": int(needed[name] * 0.99)})
        if name in needed
        else known
        for name, known in cluster.device_types.items()
    }
    return cluster.model_copy(update={"device_types": types})


def test_one_percent_less_memory_than_needed_changes_the_plan() -> None:
    num_changed = 0
    for seed in range(30):
        cluster, profile, total = random_problem(seed, max_devices=8)
        before = plan_of((cluster, profile, total))
        if before is None:
            continue
        tight = with_less(cluster, before, profile)
        after = plan_of((tight, profile, total))
        num_changed += 1
        if after is not None:
            assert after.pipelines != before.pipelines, f"seed {seed}"
            check_fits(after, profile, tight)
    assert num_changed >= 15


def check_baselines(first: int, last: int) -> None:
    """A plan of hpp is there wherever a baseline has one, and is never slower."""
    num_better = num_rivals = 0
    for seed in range(first, last):
        cluster, profile, total = random_problem(seed, max_devices=64)
        steps = {}
        for strategy in ("hpp", "uneven-layers", "even"):
            plan = plan_of((cluster, profile, total), strategy)
            if plan is not None:
                check_fits(plan, profile, cluster)
                steps[strategy] = simulate(plan, profile, cluster).step_time_s
        rival_s = min((s for name, s in steps.items() if name != "hpp"), default=None)
        if rival_s is not None:
            assert "hpp" in steps, f"seed {seed}: a baseline has a plan, hpp has none"
            assert steps["hpp"] <= rival_s, f"seed {seed}: {steps}"
            num_rivals += 1
            num_better += steps["hpp"] < rival_s
    assert num_better > num_rivals // 3


@pytest.mark.parametrize("first", [10_000, 10_005])
def test_hpp_is_never_worse_than_the_baselines(first: int) -> None:
    check_baselines(first, first + 5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_300, 10))
def test_hpp_is_never_worse_than_the_baselines_on_300_clusters(first: int) -> None:
    check_baselines(first, first + 10)
