"""The planner against brute force on small random problems (case 35, 36 and 49 among them)."""

from __future__ import annotations

import pytest
from oracle.brute_force import BruteForce
from oracle.instances import make_instance
from oracle.memory_check import check_fits

from eth_cli.errors import InfeasibleError
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.simulate import simulate

NUM_INSTANCES = 100
CHUNK = 10
INFINITE = float("inf")


def _size(seed: int) -> tuple[int, int]:
    """Devices and blocks at most: brute force is quick where one of the two is small."""
    return ((6, 6), (5, 7), (4, 8), (6, 5), (5, 8))[seed % 5]


@pytest.mark.parametrize("first", range(0, NUM_INSTANCES, CHUNK))
def test_plan_is_as_good_as_brute_force(first: int) -> None:
    num_feasible = 0
    for seed in range(first, first + CHUNK):
        max_devices, max_blocks = _size(seed)
        cluster, profile, total = make_instance(
            seed, max_devices=max_devices, max_blocks=max_blocks
        )
        optimum = BruteForce(cluster, profile, total).run()
        try:
            report = search(profile, cluster, SearchOptions(global_batch_size=total))
        except InfeasibleError:
            assert optimum == INFINITE, f"seed {seed}: a plan of {optimum} s exists"
            continue
        assert report.step_time_s == pytest.approx(optimum, rel=1e-9), f"seed {seed}"
        assert report.status == "optimal", f"seed {seed}"
        assert report.bound_s <= optimum * (1 + 1e-12), f"seed {seed}"
        assert simulate(report.plan, profile, cluster).step_time_s == report.step_time_s
        num_feasible += 1
    assert num_feasible >= CHUNK // 2


def test_bound_without_a_proof_is_below_the_optimum() -> None:
    """A budget of nothing: the status is honest, and so is the bound."""
    not_proved = 0
    for seed in range(60):
        cluster, profile, total = make_instance(seed, max_devices=4, max_blocks=5)
        optimum = BruteForce(cluster, profile, total).run()
        if optimum == INFINITE:
            continue
        options = SearchOptions(global_batch_size=total, budget=0)
        report = search(profile, cluster, options)
        assert report.bound_s <= optimum * (1 + 1e-12), f"seed {seed}"
        assert report.step_time_s >= optimum * (1 - 1e-9), f"seed {seed}"
        if report.step_time_s > optimum * (1 + 1e-9):
            assert report.status == "feasible", f"seed {seed}"
        not_proved += report.status == "feasible"
    assert not_proved > 5


def test_case_36_no_device_over_its_memory_on_200_random_problems() -> None:
    num_plans = 0
    for seed in range(5_000, 5_260):
        cluster, profile, total = make_instance(seed, max_devices=5, max_blocks=6)
        for strategy in ("hpp", "even"):
            try:
                report = search(
                    profile, cluster, SearchOptions(global_batch_size=total, strategy=strategy)
                )
            except InfeasibleError:
                continue
            num_plans += 1
            check_fits(report.plan, profile, cluster)
            memory = report.plan.predicted
            assert memory is not None
            assert all(m.bytes <= m.capacity_bytes for m in memory.memory)
    assert num_plans >= 300


def test_hpp_is_never_worse_than_the_baselines() -> None:
    num_better = 0
    for seed in range(7_000, 7_060):
        cluster, profile, total = make_instance(seed)
        steps = {}
        for strategy in ("hpp", "uneven-layers", "even"):
            try:
                options = SearchOptions(global_batch_size=total, strategy=strategy, budget=2_000)
                steps[strategy] = search(profile, cluster, options).step_time_s
            except InfeasibleError:
                steps[strategy] = INFINITE
        rival = min(steps["uneven-layers"], steps["even"])
        assert steps["hpp"] <= rival, f"seed {seed}"
        num_better += steps["hpp"] < rival
    assert num_better > 20


def test_case_49_a_feasible_problem_is_never_called_infeasible() -> None:
    """Every problem is made around a plan that fits: memory is what that plan needs, no more."""
    for seed in range(200):
        cluster, profile, total = make_instance(seed, max_devices=4, max_blocks=5)
        size = min(profile.micro_batch_sizes)
        num_stages = min(len(cluster.devices), profile.model.num_blocks)
        edges = [round(i * profile.model.num_blocks / num_stages) for i in range(num_stages + 1)]
        micro_batches = total // size
        needed = 0.0
        for s in range(num_stages):
            blocks = range(edges[s], edges[s + 1])
            activations = sum(
                entry.activation_bytes
                for b in blocks
                for entry in profile.compute
                if entry.block == profile.model.kinds[b]
                and entry.micro_batch_size == size
                and entry.device == profile.device_types[0]
            )
            neighbours = (s > 0) + (s < num_stages - 1)
            needed = max(
                needed,
                16 * sum(profile.model.parameters[b] for b in blocks)
                + activations * min(micro_batches, num_stages - s)
                + 2 * neighbours * profile.model.boundary_bytes_per_sample * size
                + profile.memory.process_bytes,
            )
        types = {
            name: t.model_copy(update={"memory_bytes": int(needed)})
            for name, t in cluster.device_types.items()
        }
        tight = cluster.model_copy(update={"device_types": types})
        search(profile, tight, SearchOptions(global_batch_size=total, budget=500))
