"""Plans made from old ones: what stays, how good they are, and that they are legal."""

from __future__ import annotations

import functools
import itertools
import random
import time

import pytest
from builders import make_cluster, make_pipeline, make_plan, make_profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.memory_check import peak_bytes

from benchmarks.clusters import random_problem
from benchmarks.problems import mixed_cluster
from benchmarks.problems import profile as problem_profile
from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError, SearchStoppedError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.placed import from_plan
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.replan import LOST, Replanned, replan
from eth_cli.search.simulate import simulate

PROFILE = make_profile()
CLUSTER = make_cluster(nodes={"a": {"fast": 4}, "b": {"fast": 4}, "c": {"slow": 4}})
OPTIONS = SearchOptions(global_batch_size=24)


def used(plan: Plan) -> set[str]:
    """Devices of a plan."""
    return {d for p in plan.pipelines for s in p.stages for d in s.devices}


def check(found: Replanned, profile: Profile, cluster: Cluster, lost: set[str]) -> None:
    """That a plan is legal, fits, does without what is lost, and is told truly."""
    report, plan = found.report, found.report.plan
    plan.check_cluster(cluster, file="plan")
    profile.check_plan(plan, file="plan", source="the profile")
    assert not used(plan) & lost
    assert {u.device for u in plan.unused_devices} == set(cluster.devices) - used(plan)
    assert {u.device for u in plan.unused_devices if u.reason == LOST} == lost
    for device, needed in peak_bytes(plan, profile, cluster).items():
        assert needed <= cluster.device_types[cluster.devices[device].type].memory_bytes
    again = simulate(plan, profile, cluster)
    assert not again.excesses
    assert again.step_time_s == pytest.approx(report.step_time_s, rel=1e-9)
    assert 0 < report.bound_s <= report.step_time_s
    assert report.gap == pytest.approx(report.step_time_s / report.bound_s - 1)


@pytest.fixture(scope="module")
def old() -> Plan:
    """The plan of twelve devices."""
    return search(PROFILE, CLUSTER, OPTIONS).plan


def test_without_a_loss_a_good_plan_stays(old: Plan) -> None:
    found = replan(PROFILE, CLUSTER, OPTIONS, old)
    check(found, PROFILE, CLUSTER, set())
    assert old.predicted is not None
    assert found.report.step_time_s <= old.predicted.step_time_s * 1.005
    assert found.moves is not None
    assert not found.is_fresh


def test_after_a_loss_the_plan_is_about_as_good_as_a_fresh_one(old: Plan) -> None:
    for lost in ({"a:0", "a:1", "a:2", "a:3"}, {"c:0"}, {"b:1", "c:2"}):
        found = replan(PROFILE, CLUSTER, OPTIONS, old, lost=lost)
        check(found, PROFILE, CLUSTER, lost)
        fresh = search(PROFILE, CLUSTER, OPTIONS.with_excluded(lost))
        assert found.report.step_time_s <= fresh.step_time_s * 1.02
        assert found.report.bound_s <= fresh.step_time_s


def test_of_equally_fast_plans_the_one_that_moves_least() -> None:
    """The pipelines that lost nothing stay where they are, device by device."""
    ways = [("a:0", "a:1"), ("a:2", "a:3"), ("b:0", "b:1"), ("b:2", "b:3")]
    cluster = make_cluster(nodes={"a": {"fast": 4}, "b": {"fast": 4}})
    plan = make_plan(
        pipelines=[make_pipeline(devices=way, cuts=(4,), micro_batches=12) for way in ways]
    )
    options = SearchOptions(global_batch_size=48, micro_batch_size=1, recompute=False)
    found = replan(PROFILE, cluster, options, plan, lost={"b:2", "b:3"})
    check(found, PROFILE, cluster, {"b:2", "b:3"})
    assert found.moves is not None
    if found.report.step_time_s > search(PROFILE, cluster, options).step_time_s:
        assert found.moves.num_read == 0
    stays = [p for p in found.report.plan.pipelines if p.stages == plan.pipelines[0].stages]
    assert stays or found.moves.moved_bytes > 0


def test_old_pipelines_that_the_limits_forbid_are_made_anew(old: Plan) -> None:
    options = SearchOptions(
        global_batch_size=30,
        micro_batch_size=2,
        max_pipelines=2,
        recompute=False,
        excluded=frozenset({"b:0"}),
    )
    found = replan(PROFILE, CLUSTER, options, old, lost=["a:1"])
    plan = found.report.plan
    assert len(plan.pipelines) <= 2
    assert {p.micro_batch_size for p in plan.pipelines} == {2}
    assert sum(p.num_samples for p in plan.pipelines) == 30
    assert not used(plan) & {"a:1", "b:0"}
    reasons = {u.device: u.reason for u in plan.unused_devices}
    assert reasons["a:1"] == LOST
    assert reasons["b:0"] != LOST
    assert plan.provenance is not None
    assert plan.provenance.options["lost"] == ["a:1"]
    assert simulate(plan, PROFILE, CLUSTER).excesses == ()


def test_nothing_left_is_infeasible(old: Plan) -> None:
    with pytest.raises(InfeasibleError, match=r"12 of 12 are lost") as caught:
        replan(PROFILE, CLUSTER, OPTIONS, old, lost=CLUSTER.devices)
    assert caught.value.exit_code == 3
    some = OPTIONS.with_excluded([d for d in CLUSTER.devices if d.startswith("a")])
    with pytest.raises(InfeasibleError, match="8 of 12 are lost and the other 4 are excluded"):
        replan(PROFILE, CLUSTER, some, old, lost=[d for d in CLUSTER.devices if d[0] != "a"])


def test_an_old_plan_that_is_of_no_use_makes_a_fresh_search(old: Plan) -> None:
    """A plan over devices that do not fit it, as one written by hand may be, hurts nobody."""
    small = make_cluster(nodes={"a": {"fast": 1}, "b": {"slow": 1}})
    plan = make_plan(pipelines=[make_pipeline(devices=("a:0",), micro_batches=8)])
    options = SearchOptions(global_batch_size=8)
    found = replan(PROFILE, small, options, plan, lost=["a:0"])
    check(found, PROFILE, small, {"a:0"})


def test_stopped_at_once_it_still_gives_what_the_old_plan_makes(old: Plan) -> None:
    found = replan(PROFILE, CLUSTER, OPTIONS, old, lost=["c:3"], is_stopped=lambda: True)
    check(found, PROFILE, CLUSTER, {"c:3"})


def test_a_search_that_is_stopped_before_it_has_a_plan_says_so() -> None:
    with pytest.raises(SearchStoppedError) as caught:
        search(PROFILE, CLUSTER, OPTIONS, is_stopped=lambda: True)
    assert caught.value.exit_code == 130


def test_a_search_gives_its_best_plan_whenever_it_is_stopped() -> None:
    """Stopped after any number of looks: a plan that fits, or the word that there is none yet."""
    optimum_s = search(PROFILE, CLUSTER, OPTIONS).step_time_s
    found = 0
    for looks in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233):
        left = itertools.chain([False] * looks, itertools.repeat(True))
        try:
            report = search(PROFILE, CLUSTER, OPTIONS, is_stopped=functools.partial(next, left))
        except SearchStoppedError:
            continue
        found += 1
        assert not report.simulation.excesses
        assert report.bound_s <= optimum_s <= report.step_time_s * (1 + 1e-9)
        assert report.status in ("optimal", "feasible")
    assert found >= 6


@pytest.mark.parametrize("strategy", ["hpp", "even", "uneven-layers"])
@pytest.mark.parametrize("limit_s", [0.05, 0.4])
def test_a_time_limit_holds_at_scale(strategy: str, limit_s: float) -> None:
    cluster = mixed_cluster(512, 3, inter_node_gbps=100)
    profile = problem_profile("gpt-neo-2.7b")
    options = SearchOptions(global_batch_size=8192, strategy=strategy, time_limit_s=limit_s)
    started_s = time.process_time()
    try:
        report = search(profile, cluster, options, clock=time.process_time)
        assert not report.simulation.excesses
    except InfeasibleError:
        assert strategy != "hpp", "one pipeline that fits is always found"
    assert time.process_time() - started_s < limit_s + 1.0  # 0.3 s where nobody else computes


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_plans_after_any_loss_are_legal(seed: int, data: st.DataObject) -> None:
    cluster, profile, batch = random_problem(seed, max_devices=14)
    options = SearchOptions(global_batch_size=batch, budget=500)
    try:
        before = search(profile, cluster, options)
    except InfeasibleError:
        return
    rng = random.Random(seed)
    names = list(cluster.devices)
    most = max(1, len(names) // 2)
    number = data.draw(st.integers(0, most))
    lost = set(rng.sample(names, number))
    try:
        found = replan(profile, cluster, options, before.plan, lost=lost)
    except InfeasibleError:
        return
    check(found, profile, cluster, lost)
    assert found.report.step_time_s >= before.bound_s * (1 - 1e-9), "fewer devices, faster"
    assert found.moves is not None
    held: dict[str, set[int]] = {}
    for pipeline in from_plan(before.plan, cluster):
        for stage in pipeline.stages:
            for device in stage.devices:
                if device.id not in lost:
                    held[device.id] = set(range(stage.start, stage.stop))
    new = [
        (d.id, block)
        for p in from_plan(found.report.plan, cluster)
        for s in p.stages
        for d in s.devices
        for block in range(s.start, s.stop)
    ]
    moves = found.moves
    assert moves.num_kept + moves.num_moved == len(new)
    if all(len(s.devices) == 1 for p in before.plan.pipelines for s in p.stages):
        # Width 1: a block is held or it is not. (A new wider stage needs a part of it only.)
        kept = sum(block in held.get(device, ()) for device, block in new)
        assert moves.num_kept == kept


@pytest.mark.parametrize(
    ("model", "gbps", "within"),
    [
        ("opt-350m", 100.0, 1.02),
        # Links so slow that sync decides: what mixes are worth is known least there.
        pytest.param("gpt-neo-2.7b", 25.0, 1.05, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 200.0, 1.02, marks=pytest.mark.slow),
    ],
)
def test_losing_a_node_of_64_devices(model: str, gbps: float, within: float) -> None:
    """Half a second of search, and a step time within 2 % of a fresh search's."""
    cluster = mixed_cluster(64, 2, inter_node_gbps=gbps)
    profile = problem_profile(model)
    options = SearchOptions(global_batch_size=2048)
    before = search(profile, cluster, options)
    for node in ("n0", "n7"):
        lost = {d.id for d in cluster.devices.values() if d.node == node}
        walls = []
        for _ in range(3):
            started_s = time.process_time()
            found = replan(profile, cluster, options, before.plan, lost=lost)
            walls.append(time.process_time() - started_s)
        started_s = time.process_time()
        fresh = search(profile, cluster, options.with_excluded(lost))
        fresh_s = time.process_time() - started_s
        check(found, profile, cluster, lost)
        assert found.report.step_time_s <= fresh.step_time_s * within
        # Processor time: 0.2 to 0.35 s where nobody else computes.
        assert min(walls) < max(0.5, fresh_s / 5)
