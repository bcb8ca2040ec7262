"""Behaviour that users of other planners asked for, by the number of its case."""

from __future__ import annotations

import itertools
import math

import pytest
from oracle.brute_force import INFINITE, BruteForce
from oracle.instances import make_whole_instance
from oracle.memory_check import check_fits, peak_bytes
from unit.search.problems import cluster_of, plan_of, profile_of

from eth_cli import serde
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.simulate import simulate

GB = 10**9


def test_case_35_a_24_gb_and_an_8_gb_device_each_get_what_fits() -> None:
    """An even cut needs 15 GB on both; every stage of the plan is within its own device."""
    parameters = [125_000_000] * 12  # 2 GB a block
    profile = profile_of(
        blocks={"large": [(0.01, 0.02)] * 12, "small": [(0.01, 0.02)] * 12},
        parameters=parameters,
        activations=[50_000_000] * 12,
    )
    cluster = cluster_of({"large": 1}, {"small": 1}, memory={"large": 24 * GB, "small": 8 * GB})
    even = plan_of((8, [(0, 6, "n0:0"), (6, 12, "n1:0")]))
    assert {e.device for e in simulate(even, profile, cluster).excesses} == {"n1:0"}
    report = search(profile, cluster, SearchOptions(global_batch_size=8))
    check_fits(report.plan, profile, cluster)
    assert peak_bytes(report.plan, profile, cluster)["n0:0"] > 8 * GB


def test_case_35_infeasible_has_its_exit_code_and_says_what_would_help() -> None:
    profile = profile_of(
        blocks={"large": [(0.01, 0.02)] * 4, "small": [(0.01, 0.02)] * 4},
        parameters=[1_000_000_000] * 4,
        activations=[0] * 4,
    )
    # One block is 16 GB: the large device holds one of the four, the small one none.
    cluster = cluster_of({"large": 1}, {"small": 1}, memory={"large": 24 * GB, "small": 8 * GB})
    with pytest.raises(InfeasibleError) as caught:
        search(profile, cluster, SearchOptions(global_batch_size=4))
    assert caught.value.exit_code == 3
    assert caught.value.suggestion


def test_case_38_a_process_and_its_buffers_count_on_every_device() -> None:
    """One process without communication has no boundary buffers, each of two has its own."""
    profile = profile_of(
        blocks={"x": [(0.01, 0.02)] * 4}, boundary_bytes=5_000, micro_batch_sizes=(2,)
    )
    cluster = cluster_of({"x": 2})
    alone = simulate(plan_of((2, [(0, 4, "n0:0")]), size=2), profile, cluster)
    both = simulate(plan_of((2, [(0, 2, "n0:0"), (2, 4, "n0:1")]), size=2), profile, cluster)
    assert [s.memory.process_bytes for s in (*alone.stages, *both.stages)] == [77] * 3
    assert [s.memory.boundary_bytes for s in alone.stages] == [0]
    # A buffer to send and one to receive, of two samples each.
    assert [s.memory.boundary_bytes for s in both.stages] == [20_000, 20_000]
    assert sum(s.memory.parameters_bytes for s in both.stages) == sum(
        s.memory.parameters_bytes for s in alone.stages
    )


def test_case_49_a_problem_with_a_plan_is_never_called_infeasible() -> None:
    """By brute force, not by construction: 200 random problems of the whole space."""
    num_feasible = num_infeasible = 0
    faults = []
    for seed in range(20_000, 20_200):
        cluster, profile, total = make_whole_instance(seed, max_devices=3, max_blocks=5)
        has_plan = BruteForce(cluster, profile, total, spare_recompute=False).run() < INFINITE
        try:
            search(profile, cluster, SearchOptions(global_batch_size=total, budget=500))
            found = True
        except InfeasibleError:
            found = False
        if found != has_plan:
            faults.append(seed)
        num_feasible += has_plan
        num_infeasible += not has_plan
    assert not faults, f"seeds {faults}"
    assert min(num_feasible, num_infeasible) >= 20


def test_case_49_a_device_with_room_for_all_blocks_but_not_for_one_is_used() -> None:
    """A single pipeline of one stage has no boundary buffers, so it needs less than one block."""
    profile = profile_of(
        blocks={"x": [(0.01, 0.02)] * 2}, boundary_bytes=400_000, activations=[10_000] * 2
    )
    needed = 16 * 2_000 + 2 * 10_000 + 77
    cluster = cluster_of({"x": 2}, memory_bytes=needed)
    report = search(profile, cluster, SearchOptions(global_batch_size=4))
    assert [len(p.stages) for p in report.plan.pipelines] == [1, 1]
    with pytest.raises(InfeasibleError):
        search(
            profile,
            cluster_of({"x": 2}, memory_bytes=needed - 1),
            SearchOptions(global_batch_size=4, recompute=False),
        )


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4), (3, 3)])
def test_case_52_stages_of_a_pipeline_cross_between_nodes_once(sizes: tuple[int, int]) -> None:
    """As many stages as devices, over two nodes: the fewest edges between nodes is one."""
    num_devices = sum(sizes)
    profile = profile_of(
        blocks={"x": [(0.01, 0.02)] * num_devices},
        boundary_bytes=10_000,
        parameters=[10_000] * num_devices,
    )
    # A device holds one block with all its activations in flight; two are 320,000 bytes and more.
    room = 160_000 + 10_000 * num_devices + 4 * 10_000 + 77
    cluster = cluster_of(*({"x": n} for n in sizes), memory_bytes=room, inter=(1e-3, 1e8))
    report = search(profile, cluster, SearchOptions(global_batch_size=num_devices))
    (pipeline,) = report.plan.pipelines
    assert len(pipeline.stages) == num_devices
    nodes = [cluster.devices[s.devices[0]].node for s in pipeline.stages]
    assert sum(a != b for a, b in itertools.pairwise(nodes)) == 1, nodes


def test_case_52_a_model_of_more_like_layers_takes_the_same_profile() -> None:
    """Entries are of kinds of blocks: as many for 40 layers as for 4, and both can be planned."""
    for num_layers in (4, 40):
        data = serde.to_data(profile_of(blocks={"x": [(0.01, 0.02)]}))
        data["model"]["blocks"][0]["count"] = num_layers
        same = serde.validate(Profile, data, "longer")
        report = search(same, cluster_of({"x": 2}), SearchOptions(global_batch_size=4))
        assert len(same.compute) == 1
        assert report.plan.num_blocks == num_layers


def test_case_54_mixed_types_in_one_node_do_not_pace_each_other() -> None:
    """One node with a fast and a slow device: shares follow the speeds, neither waits long."""
    profile = profile_of(
        blocks={"fast": [(0.01, 0.02)] * 3, "slow": [(0.03, 0.06)] * 3}, parameters=[100] * 3
    )
    report = search(
        profile, cluster_of({"fast": 1, "slow": 1}), SearchOptions(global_batch_size=16)
    )
    shares = {p.stages[0].devices[0]: p.num_samples for p in report.plan.pipelines}
    assert shares == {"n0:0": 12, "n0:1": 4}
    assert math.isclose(report.step_time_s, 12 * 0.09, rel_tol=0.01)
