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

BUDGET = 500
"""Candidates of the exhaustive search: these tests are of plans, not of proofs."""
A_LONG_TIME = pytest.mark.timeout(900)
"""For tests of so many clusters that a busy machine takes minutes for them."""


def plan_of(problem: Instance, strategy: str = "hpp") -> Plan | None:
    """The plan of a strategy; None: it has none."""
    cluster, profile, total = problem
    options = SearchOptions(global_batch_size=total, strategy=strategy, budget=BUDGET)
    try:
        return search(profile, cluster, options).plan
    except InfeasibleError:
        return None


def with_workspaces(profile: Profile) -> Profile:
    """The profile, with blocks that take a part of their activations more while they run."""
    compute = [
        entry.model_copy(update={"workspace_bytes": entry.activation_bytes // (3 + i % 4)})
        for i, entry in enumerate(profile.compute)
    ]
    return profile.model_copy(update={"compute": tuple(compute)})


def check_memory(first: int, *, num_plans: int) -> None:
    """No device is above its capacity, by the tests' own formula and by the plan's prediction."""
    seeds = iter(range(first, first + 2 * num_plans))
    found = 0
    while found < num_plans:
        seed = next(seeds)
        cluster, profile, total = random_problem(seed, max_devices=12)
        if seed % 2:
            profile = with_workspaces(profile)
        plan = plan_of((cluster, profile, total))
        if plan is None:
            continue
        found += 1
        check_fits(plan, profile, cluster)
        assert plan.predicted is not None
        told = {m.device: m.bytes for m in plan.predicted.memory}
        assert told == peak_bytes(plan, profile, cluster), f"seed {seed}"
        used = {d for p in plan.pipelines for s in p.stages for d in s.devices}
        assert used | {u.device for u in plan.unused_devices} == set(cluster.devices)


def test_case_36_no_device_is_above_its_memory() -> None:
    check_memory(0, num_plans=12)


@pytest.mark.slow
@A_LONG_TIME
@pytest.mark.parametrize("first", range(0, 2_000, 100))
def test_case_36_no_device_is_above_its_memory_in_1000_plans(first: int) -> None:
    check_memory(first, num_plans=50)


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


def check_less_memory(last: int, *, max_devices: int) -> None:
    """With 1 % less memory than a plan needs there is another plan, or none."""
    num_changed = 0
    for seed in range(last):
        cluster, profile, total = random_problem(seed, max_devices=max_devices)
        before = plan_of((cluster, profile, total))
        if before is None:
            continue
        tight = with_less(cluster, before, profile)
        after = plan_of((tight, profile, total))
        num_changed += 1
        if after is not None:
            assert after.pipelines != before.pipelines, f"seed {seed}"
            check_fits(after, profile, tight)
    assert num_changed >= last * 0.5


def test_one_percent_less_memory_than_needed_changes_the_plan() -> None:
    check_less_memory(20, max_devices=6)


@pytest.mark.slow
@A_LONG_TIME
def test_one_percent_less_memory_than_needed_changes_the_plan_on_100_clusters() -> None:
    check_less_memory(100, max_devices=16)


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


def test_hpp_is_never_worse_than_the_baselines() -> None:
    check_baselines(10_000, 10_006)


@pytest.mark.slow
@A_LONG_TIME
@pytest.mark.parametrize("first", range(10_000, 10_300, 10))
def test_hpp_is_never_worse_than_the_baselines_on_300_clusters(first: int) -> None:
    check_baselines(first, first + 10)
