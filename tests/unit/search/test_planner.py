"""`search` as a whole: reports, options, reasons, infeasibility, cases by number, invariants."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from builders import make_cluster, make_profile
from unit.search.problems import cluster_of, plan_of, profile_of

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, SearchReport, compare, search, self_contained
from eth_cli.search.request import MAX_MICRO_BATCHES
from eth_cli.search.simulate import Simulation, simulate, simulate_with

MIB = 2**20


def _mixed_eight() -> tuple[Cluster, Profile]:
    """4 fast and 4 slow devices at a third of the speed, none of which holds the model alone."""
    cluster = make_cluster(nodes={"new": {"fast": 4}, "old": {"slow": 4}})
    profile = make_profile(num_layers=8, micro_batch_sizes=(1, 2, 4))
    whole = 16 * profile.model.stage_parameters(0, 10)
    types = {
        name: t.model_copy(update={"memory_bytes": int(0.8 * whole)})
        for name, t in cluster.device_types.items()
    }
    return cluster.model_copy(update={"device_types": types}), profile


def _with_memory(cluster: Cluster, memory: dict[str, int]) -> Cluster:
    types = {
        name: t.model_copy(update={"memory_bytes": memory.get(name, t.memory_bytes)})
        for name, t in cluster.device_types.items()
    }
    return cluster.model_copy(update={"device_types": types})


def _plan(cluster: Cluster, profile: Profile, total: int, **options: Any) -> SearchReport:
    return search(profile, cluster, SearchOptions(global_batch_size=total, **options))


# --- The main path -------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [16, 24, 48])
def test_mixed_eight_is_at_least_1_6_times_faster_than_even_and_proved(total: int) -> None:
    cluster, profile = _mixed_eight()
    hpp = _plan(cluster, profile, total)
    even = _plan(cluster, profile, total, strategy="even")
    assert even.step_time_s / hpp.step_time_s >= 1.6
    assert hpp.status == "optimal"
    assert hpp.bound_s == hpp.step_time_s


@pytest.mark.parametrize(
    "nodes",
    [
        {"three": {"fast": 3}, "four": {"slow": 4}, "one": {"mid": 1}},
        {"a": {"fast": 2, "slow": 1}, "b": {"slow": 2}, "c": {"mid": 2}},
        {"a": {"fast": 1}, "b": {"mid": 1}},
    ],
)
def test_odd_counts_and_mixed_nodes(nodes: dict[str, dict[str, int]]) -> None:
    cluster = make_cluster(nodes=nodes)
    profile = make_profile(types=("fast", "slow", "mid"))
    report = _plan(cluster, profile, 17)
    assert sum(p.num_samples for p in report.plan.pipelines) == 17
    again = simulate(report.plan, profile, cluster)
    assert again.step_time_s == report.step_time_s
    assert report.bound_s <= report.step_time_s


def test_plan_carries_prediction_solver_and_provenance() -> None:
    cluster, profile = make_cluster(), make_profile()
    ticks = iter([10.0, 12.25])
    options = SearchOptions(global_batch_size=8)
    report = search(profile, cluster, options, clock=lambda: next(ticks))
    plan = report.plan
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == report.step_time_s
    assert sum(plan.predicted.terms.values()) == pytest.approx(report.step_time_s)
    assert plan.solver is not None
    assert (plan.solver.wall_s, report.wall_s) == (3.0, 2.25)
    assert plan.solver.gap == report.gap == 0
    assert plan.provenance is not None
    assert plan.provenance.digests == {"cluster": cluster.digest(), "profile": profile.digest()}
    assert plan.provenance.options["global_batch_size"] == 8
    assert Plan.model_validate_json(serde.dump_json(serde.to_data(plan))) == plan


def test_compare_gives_all_three_and_hpp_is_best() -> None:
    cluster, profile = _mixed_eight()
    answers = compare(profile, cluster, SearchOptions(global_batch_size=16))
    assert list(answers) == ["hpp", "uneven-layers", "even"]
    times = []
    for answer in answers.values():
        assert isinstance(answer, SearchReport)
        times.append(answer.step_time_s)
    assert times == sorted(times)
    hpp = answers["hpp"]
    assert isinstance(hpp, SearchReport)
    assert [r.step_time_s for r in hpp.rivals] == times[1:]


def test_compare_says_why_a_baseline_has_no_plan() -> None:
    # Two blocks need 52 kB: more than the small device has. Four need 104 kB, three 78 kB.
    profile = profile_of(blocks={"x": [(1.0, 2.0)] * 4, "y": [(1.1, 2.1)] * 4})
    cluster = cluster_of({"x": 1}, {"y": 1}, memory={"x": 110_000, "y": 36_000})
    answers = compare(profile, cluster, SearchOptions(global_batch_size=1))
    even = answers["even"]
    assert isinstance(even, SearchReport)
    (left_out,) = even.plan.unused_devices
    assert left_out.device == "n1:0"
    assert "lacking" in left_out.reason
    tight = _with_memory(cluster, {"x": 90_000})
    answers = compare(profile, tight, SearchOptions(global_batch_size=1))
    assert isinstance(answers["even"], InfeasibleError)
    assert "y" in answers["even"].binding
    assert isinstance(answers["hpp"], SearchReport)


def test_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hpp, uneven-layers, even"):
        _plan(make_cluster(), make_profile(), 8, strategy="best")


# --- Options and the batch ----------------------------------------------------------------------


def test_fixed_micro_batch_size_is_used_everywhere() -> None:
    report = _plan(make_cluster(), make_profile(), 8, micro_batch_size=2)
    assert {p.micro_batch_size for p in report.plan.pipelines} == {2}


@pytest.mark.parametrize(
    ("total", "size", "numbers"),
    [
        (100, 8, ("100", "8")),  # case 13: not divisible
        (4, 8, ("4", "8")),  # smaller than one micro-batch
        (8, 3, ("8", "3")),
        (12, 3, ("3", "1, 2")),  # not in the profile
        (0, None, ("0",)),
        (8, 0, ("0",)),
    ],
)
def test_case_13_batch_and_micro_batch_that_do_not_go_together(
    total: int, size: int | None, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(make_cluster(), make_profile(), total, micro_batch_size=size)
    (fault,) = caught.value.faults
    assert fault.file in ("--global-batch-size", "--micro-batch-size")
    assert all(number in fault.message for number in numbers)


def test_case_13_batch_that_no_sum_of_micro_batches_gives() -> None:
    profile = make_profile(micro_batch_sizes=(4, 6))
    with pytest.raises(ConfigError, match="7 samples are no sum"):
        _plan(make_cluster(), profile, 7)
    with pytest.raises(ConfigError, match="3 samples are fewer than one micro-batch"):
        _plan(make_cluster(), profile, 3)
    mixed = _plan(make_cluster(), profile, 10)
    assert sorted(p.num_samples for p in mixed.plan.pipelines) == [4, 6]


def test_a_search_that_nobody_would_wait_for_is_refused() -> None:
    profile = make_profile(micro_batch_sizes=(1, 64))
    with pytest.raises(ConfigError, match="profile a size of at least 15259"):
        _plan(make_cluster(), profile, 10**9)
    with pytest.raises(
        ConfigError, match=r"1000001 micro-batches of 1; .* use 1000000 samples, .* of 64 divide"
    ):
        _plan(make_cluster(), profile, 1_000_001)
    with pytest.raises(ConfigError, match=r"1000000 micro-batches of 1; .* --micro-batch-size 64"):
        _plan(make_cluster(), profile, 1_000_000, micro_batch_size=1)
    deep = make_profile(num_layers=511)
    with pytest.raises(ConfigError, match="are 513; at most 512 are planned"):
        _plan(make_cluster(), deep, 8)


def test_micro_batches_are_counted_at_the_largest_size_that_divides() -> None:
    """A million samples are 15,625 micro-batches of 64, whatever smaller sizes would make."""
    for sizes, total in (((1, 64), 1_000_000), ((1,), MAX_MICRO_BATCHES)):
        report = _plan(make_cluster(), make_profile(micro_batch_sizes=sizes), total)
        assert sum(p.num_samples for p in report.plan.pipelines) == total
    with pytest.raises(ConfigError, match="65537 micro-batches of 1; at most 65536"):
        _plan(make_cluster(), make_profile(micro_batch_sizes=(1,)), MAX_MICRO_BATCHES + 1)


# --- Devices left out ----------------------------------------------------------------------------


def test_type_that_the_profile_lacks_is_unused_with_the_reason() -> None:
    cluster = make_cluster(nodes={"a": {"fast": 2}, "b": {"mid": 1}})
    report = _plan(cluster, make_profile(types=("fast",)), 8)
    (unused,) = report.plan.unused_devices
    assert unused.device == "b:0"
    assert "no entry for mid" in unused.reason


def test_no_type_in_the_profile_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"has fast, but the cluster small has mid"):
        _plan(make_cluster(nodes={"a": {"mid": 2}}), make_profile(types=("fast",)), 8)


def test_memory_too_small_for_any_stage_is_the_reason() -> None:
    cluster = _with_memory(make_cluster(), {"slow": 1_000_000})
    report = _plan(cluster, make_profile(), 8)
    assert {u.device for u in report.plan.unused_devices} == {"b:0", "b:1"}
    assert all("memory is too small for any stage" in u.reason for u in report.plan.unused_devices)


def test_whole_model_is_planned_where_no_block_alone_has_room_for_its_boundaries() -> None:
    # Whole: 64 B of parameters, 20 B of activations, 77 B of process. A block alone, with one
    # neighbour at least: 2 x 1,000 B of buffers.
    profile = profile_of(
        blocks={"A": [(1.0, 2.0)] * 2},
        parameters=[2, 2],
        activations=[10, 10],
        boundary_bytes=1_000,
    )
    report = _plan(cluster_of({"A": 1}, {"A": 1}, memory_bytes=161), profile, 4, recompute=False)
    assert [len(p.stages) for p in report.plan.pipelines] == [1, 1]
    assert report.status == "optimal"
    with pytest.raises(InfeasibleError):
        _plan(cluster_of({"A": 1}, {"A": 1}, memory_bytes=160), profile, 4, recompute=False)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (None, "a stage of it needs 2 B in one node (tensor-parallel width 2), and no node has"),
        ((1,), "the profile has B at tensor-parallel width 2 only, and the search is limited to 1"),
    ],
)
def test_type_without_a_usable_width_is_unused_with_the_reason(
    asked: tuple[int, ...] | None, reason: str
) -> None:
    both = profile_of(blocks={"A": [(1.0, 2.0)] * 2, "B": [(1.0, 2.0)] * 2}, tensor_parallel=(1, 2))
    profile = both.model_copy(
        update={
            "compute": tuple(
                e for e in both.compute if (e.device, e.tensor_parallel) in {("A", 1), ("B", 2)}
            )
        }
    )
    nodes = [{"A": 1}, {"B": 1}, {"B": 1}] if asked is None else [{"A": 1}, {"B": 2}]
    report = _plan(cluster_of(*nodes), profile, 4, tensor_parallel=asked)
    found = {u.reason for u in report.plan.unused_devices}
    assert len(found) == 1
    assert reason in found.pop()


@pytest.mark.parametrize("strategy", ["hpp", "uneven-layers", "even"])
def test_no_plan_has_more_pipelines_than_allowed(strategy: str) -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)] * 4})
    cluster = cluster_of({"A": 4})
    times = []
    for most in (1, 2, 4):
        report = _plan(cluster, profile, 8, strategy=strategy, max_pipelines=most)
        assert len(report.plan.pipelines) <= most
        times.append(report.step_time_s)
    free = _plan(cluster, profile, 8, strategy=strategy)
    assert len(free.plan.pipelines) == 4
    assert times[0] > times[1] > times[2] == free.step_time_s


def test_device_that_would_slow_the_plan_is_left_out_with_both_times() -> None:
    profile = profile_of(
        blocks={"x": [(0.001, 0.002)] * 3, "y": [(5.0, 9.0)] * 3}, boundary_bytes=1_000
    )
    report = _plan(cluster_of({"x": 2}, {"y": 1}), profile, 4)
    (unused,) = report.plan.unused_devices
    assert unused.device == "n1:0"
    assert unused.reason.startswith("would not speed up the plan: 14")
    assert " without" in unused.reason


def test_an_answer_that_the_simulator_denies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where assertions are compiled away."""
    for change, text in (
        (lambda s: {"step_time_s": 2 * s.step_time_s}, "the simulator takes"),
        (lambda _: {"excesses": ("n0:0 lacks 5 bytes",)}, "does not fit: n0:0 lacks 5 bytes"),
    ):

        def changed(*args: Any, change: Any = change, **options: Any) -> Simulation:
            simulation = simulate_with(*args, **options)
            return replace(simulation, **change(simulation))

        monkeypatch.setattr("eth_cli.search.answer.simulate_with", changed)
        with pytest.raises(RuntimeError, match=text):
            _plan(cluster_of({"x": 1}), profile_of(blocks={"x": [(1.0, 2.0)]}), 2)


@pytest.mark.parametrize("rate", [1e8, 1e9])
def test_like_devices_get_no_worse_than_any_plain_grid_by_column(rate: float) -> None:
    """Owners of a segment on one node, so that all sync stays inside nodes."""
    profile = profile_of(
        blocks={"x": [(0.003, 0.006)] * 8},
        parameters=[10_000_000] * 8,
        activations=[1_000_000] * 8,
        boundary_bytes=100_000,
    )
    memory = 2 * 160_000_000 + 20_000_000  # two blocks a device
    cluster = cluster_of(*({"x": 4},) * 4, memory_bytes=memory, inter=(3e-5, rate))
    devices = list(cluster.devices)
    times = []
    for num_stages in (4, 8):
        num_pipelines, size = 16 // num_stages, 8 // num_stages
        grid = plan_of(
            *(
                (
                    32 // num_pipelines,
                    [
                        (s * size, (s + 1) * size, devices[s * num_pipelines + i])
                        for s in range(num_stages)
                    ],
                )
                for i in range(num_pipelines)
            )
        )
        plain = simulate(grid, profile, cluster)
        assert not plain.excesses
        times.append(plain.step_time_s)
    assert _plan(cluster, profile, 32, budget=0).step_time_s <= min(times) * (1 + 1e-9)


# --- Infeasible ----------------------------------------------------------------------------------


def test_infeasible_names_type_stage_bytes_and_computed_changes() -> None:
    profile = make_profile(micro_batch_sizes=(1, 4))
    # A device has room for one layer with all its micro-batches in flight, not for two.
    memory = {"fast": 175_000_000, "slow": 185_000_000}
    cluster = _with_memory(make_cluster(), memory)
    with pytest.raises(InfeasibleError) as caught:
        _plan(cluster, profile, 8, recompute=False)
    error = caught.value
    assert "bytes" in error.binding
    assert "are lacking" in error.binding
    assert "fast" in error.binding or "slow" in error.binding
    number, more, device_type = error.suggestion.split()[-3:]
    assert more == "more"
    # What it suggests is true: with so many more devices of that type a plan exists.
    nodes = {"a": {"fast": 2}, "b": {"slow": 2}, "c": {device_type: int(number)}}
    _plan(_with_memory(make_cluster(nodes=nodes), memory), profile, 8, recompute=False)


def test_infeasible_suggests_a_smaller_micro_batch_and_recomputation_where_they_help() -> None:
    profile = profile_of(
        blocks={"x": [(1.0, 2.0), (1.1, 2.1)]},
        activations=[400_000, 380_000],
        micro_batch_sizes=(1, 2),
    )
    cluster = cluster_of({"x": 2}, memory_bytes=1_000_000)
    with pytest.raises(InfeasibleError) as caught:
        _plan(cluster, profile, 8, micro_batch_size=2, recompute=False)
    assert "micro-batch size 1" in caught.value.suggestion
    assert "recomputing activations" in caught.value.suggestion
    _plan(cluster, profile, 8, micro_batch_size=1, recompute=False)
    _plan(cluster, profile, 8, micro_batch_size=2)


# --- Cases by number -----------------------------------------------------------------------------


def test_case_2_the_larger_memory_is_used() -> None:
    """32 + 24 units: the larger device holds more than the smaller one could, and gets more."""
    blocks = {"big": [(1.0, 2.0)] * 6, "small": [(1.6, 3.1)] * 6}
    profile = profile_of(blocks=blocks, activations=[9_000] * 6)
    # Together 6 x 16,000 bytes of parameters do not fit one of them.
    memory = {"big": 32 * 3_400, "small": 24 * 3_400}
    report = _plan(cluster_of({"big": 1}, {"small": 1}, memory=memory), profile, 12)
    assert report.plan.predicted is not None
    by_device = {m.device: m for m in report.plan.predicted.memory}
    assert by_device["n0:0"].bytes > memory["small"]
    assert by_device["n1:0"].bytes <= memory["small"]
    # With room for the whole model on each, both run it and their shares differ.
    memory = {"big": 32 * 7_000, "small": 24 * 7_000}
    report = _plan(cluster_of({"big": 1}, {"small": 1}, memory=memory), profile, 12)
    shares = {p.stages[0].devices[0]: p.num_samples for p in report.plan.pipelines}
    assert shares == {"n0:0": 8, "n1:0": 4} or shares == {"n0:0": 7, "n1:0": 5}


def test_case_4_uneven_shares_speed_up_within_a_stated_bound() -> None:
    """One fast and one slow device (a third of its speed), each with the whole model.

    Even shares wait for the slow one: 8 x 3 units for 16 samples. The best split is 12 : 4, 12
    units: twice as fast, less the sync that both have.
    """
    profile = profile_of(blocks={"x": [(0.1, 0.2)] * 4, "y": [(0.3, 0.6)] * 4})
    cluster = cluster_of({"x": 1}, {"y": 1}, memory_bytes=150_000)
    hpp = _plan(cluster, profile, 16)
    shares = {p.stages[0].devices[0]: p.num_samples for p in hpp.plan.pipelines}
    assert shares == {"n0:0": 12, "n1:0": 4}
    even = _plan(cluster, profile, 16, strategy="even")
    assert 1.99 < even.step_time_s / hpp.step_time_s <= 2.0


def test_case_22_more_devices_than_blocks() -> None:
    """Every stage has a block, and every device without a stage is listed as unused."""
    profile = make_profile(num_layers=1)
    memory = {"fast": 70_000_000 + 50_000_000, "slow": 70_000_000 + 50_000_000}
    cluster = _with_memory(make_cluster(nodes={"a": {"fast": 3}, "b": {"slow": 2}}), memory)
    for strategy in ("hpp", "uneven-layers", "even"):
        plan = _plan(cluster, profile, 1, strategy=strategy).plan
        used = [d for p in plan.pipelines for s in p.stages for d in s.devices]
        unused = [u.device for u in plan.unused_devices]
        assert sorted(used + unused) == sorted(cluster.devices)
        assert all(u.reason for u in plan.unused_devices)
        for pipeline in plan.pipelines:
            assert all(stage.num_blocks >= 1 for stage in pipeline.stages)
            assert pipeline.stages[0].blocks[0] == 0
            assert pipeline.stages[-1].blocks[1] == 3


def test_case_26_the_time_of_the_head_moves_the_cut() -> None:
    """A head as slow as two layers takes their place in the last stage."""

    def cut(head_s: float) -> int:
        layers = [(1.0, 2.0)] * 6
        profile = profile_of(blocks={"x": [(0.1, 0.2), *layers, (head_s, 2 * head_s)]})
        memory = 16 * 1_000 * 5 + 10_000 * 5 * 2 + 77  # five blocks of eight
        report = _plan(cluster_of({"x": 2}, memory_bytes=memory), profile, 32)
        (pipeline,) = report.plan.pipelines
        return pipeline.stages[0].blocks[1]

    assert cut(0.1) == 4
    assert cut(2.0) == 5


def test_case_35_uneven_memory_is_respected_stage_by_stage() -> None:
    """24 GB + 8 GB in one pipeline: an even cut overflows the small one, the plan does not."""
    profile = make_profile(num_layers=14, types=("fast",))
    cluster = make_cluster(nodes={"a": {"fast": 1}, "b": {"fast": 1}})
    needed = 16 * profile.model.stage_parameters(0, 16)
    big, small = int(needed * 0.9), int(needed * 0.6)
    data = serde.to_data(cluster)
    data["device_types"]["slow"] = data["device_types"]["fast"] | {"memory_bytes": small}
    data["device_types"]["fast"]["memory_bytes"] = big
    data["nodes"][1]["devices"][0]["type"] = "slow"
    cluster = serde.validate(Cluster, data, "c")
    profile = make_profile(num_layers=14, types=("fast", "slow"))
    with pytest.raises(InfeasibleError):
        _plan(cluster, profile, 6, strategy="even")
    report = _plan(cluster, profile, 6)
    (pipeline,) = report.plan.pipelines
    blocks = {cluster.devices[s.devices[0]].type: s.num_blocks for s in pipeline.stages}
    assert blocks["fast"] > blocks["slow"]
    assert report.plan.predicted is not None
    assert all(m.bytes <= m.capacity_bytes for m in report.plan.predicted.memory)


def test_one_percent_less_memory_than_the_plan_uses_changes_it() -> None:
    cluster, profile = _mixed_eight()
    before = _plan(cluster, profile, 16)
    assert before.plan.predicted is not None
    largest = max(m.bytes for m in before.plan.predicted.memory)
    tight = _with_memory(cluster, dict.fromkeys(cluster.device_types, int(largest * 0.99)))
    after = _plan(tight, profile, 16)
    assert after.plan.pipelines != before.plan.pipelines
    assert after.plan.predicted is not None
    assert max(m.bytes for m in after.plan.predicted.memory) <= int(largest * 0.99)


# --- Invariants ----------------------------------------------------------------------------------


def _scaled(profile: Profile, factor: float) -> Profile:
    """All times of a profile without links of its own, longer by a factor."""
    data = serde.to_data(profile)
    for entry in data["compute"]:
        entry["forward_s"] *= factor
        entry["backward_s"] *= factor
    for entry in data["devices"]:
        entry["optimizer_s_per_parameter"] *= factor
    return serde.validate(Profile, data, "scaled")


def _slower_links(cluster: Cluster, factor: float) -> Cluster:
    def slow(link: Any) -> Any:
        return link.model_copy(
            update={
                "latency_s": link.latency_s * factor,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s / factor,
            }
        )

    network = cluster.network.model_copy(
        update={
            "intra_node": slow(cluster.network.intra_node),
            "inter_node": slow(cluster.network.inter_node),
        }
    )
    return cluster.model_copy(update={"network": network})


def test_scaling_all_times_scales_the_step_time_and_nothing_else() -> None:
    cluster, profile = _mixed_eight()
    plain = _plan(cluster, profile, 16)
    # A power of two scales without rounding.
    slow = _plan(_slower_links(cluster, 4.0), _scaled(profile, 4.0), 16)
    assert slow.step_time_s == 4.0 * plain.step_time_s
    assert slow.plan.pipelines == plain.plan.pipelines


def test_renaming_nodes_changes_only_names() -> None:
    profile = make_profile()
    plain = _plan(make_cluster(nodes={"a": {"fast": 2}, "b": {"slow": 2}}), profile, 8)
    named = _plan(make_cluster(nodes={"z": {"fast": 2}, "c": {"slow": 2}}), profile, 8)
    text = serde.dump_json(serde.to_data(plain.plan)["pipelines"])
    for old, new in (("a:", "z:"), ("b:", "c:")):
        text = text.replace(f'"{old}', f'"{new}')
    assert text == serde.dump_json(serde.to_data(named.plan)["pipelines"])


def test_same_inputs_same_bytes_whatever_the_hash_seed() -> None:
    code = (
        "from builders import make_cluster, make_profile\n"
        "from eth_cli import serde\n"
        "from eth_cli.search.planner import SearchOptions, search\n"
        "c = make_cluster(nodes={'a': {'fast': 2, 'mid': 1}, 'b': {'slow': 2}})\n"
        "p = make_profile(types=('fast', 'slow', 'mid'))\n"
        "plan = search(p, c, SearchOptions(global_batch_size=9)).plan\n"
        "print(serde.dump_json(serde.to_data(plan)))\n"
    )
    tests = os.path.join(os.path.dirname(__file__), "..", "..")
    texts = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": tests},
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    assert '"pipelines"' in texts.pop()


# --- Self-contained plans ------------------------------------------------------------------------


def test_self_contained_plan_paces_what_it_uses_of_emulated_devices() -> None:
    cluster = make_cluster(emulated=True)
    profile = make_profile(micro_batch_sizes=(1, 2, 4))
    report = _plan(cluster, profile, 8, micro_batch_size=2)
    plan = self_contained(report.plan, cluster, profile, None)
    assert plan.cluster == cluster
    assert plan.pacing is not None
    assert {b.micro_batch_size for b in plan.pacing.blocks} == {2}
    used = {cluster.devices[d].type for p in plan.pipelines for s in p.stages for d in s.devices}
    assert {b.device for b in plan.pacing.blocks} == used
    assert len(plan.pacing.blocks) == 3 * len(used)
    assert {o.device for o in plan.pacing.optimizers} == used
    assert Plan.model_validate_json(serde.dump_json(serde.to_data(plan))) == plan
    assert self_contained(report.plan, make_cluster(), profile, None).pacing is None


# --- Scale ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_nodes", "num_types", "memory_bytes"),
    [(8, 2, 10_000_000), (12, 3, 10_000_000), (6, 3, 4_400_000)],
)
def test_large_clusters_end_in_bounded_time(
    num_nodes: int, num_types: int, memory_bytes: int
) -> None:
    types = ["t0", "t1", "t2", "t3"][:num_types]
    profile = profile_of(
        blocks={
            t: [(0.002, 0.004), *[(0.010 + 0.007 * i, 0.021 + 0.013 * i)] * 12, (0.006, 0.011)]
            for i, t in enumerate(types)
        },
        micro_batch_sizes=(1, 2),
        activations=[100_000] * 14,
        parameters=[90_000] * 14,
    )
    cluster = cluster_of(
        *({types[i % num_types]: 7} for i in range(num_nodes)), memory_bytes=memory_bytes
    )
    report = _plan(cluster, profile, 3 * 7 * num_nodes)
    assert report.gap < 1.0
    used = {d for p in report.plan.pipelines for s in p.stages for d in s.devices}
    unused = {u.device for u in report.plan.unused_devices if u.reason}
    assert used | unused == set(cluster.devices)
    assert not report.simulation.excesses
    assert report.step_time_s <= min(
        (r.step_time_s for r in report.rivals if r.step_time_s is not None), default=1e9
    )
