"""Why a plan is as it is: every figure of the explanation, computed in another way as well."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from oracle.memory_check import peak_bytes
from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Cluster
from eth_cli.search.again import SearchAgain
from eth_cli.search.explain import Explanation, explain
from eth_cli.search.planner import SearchOptions, SearchReport, search
from eth_cli.search.simulate import simulate

BLOCK_S = {"fast": (0.010, 0.021), "slow": (0.033, 0.064)}
PROFILE = profile_of(
    blocks={t: [(f * (1 + i / 20), b) for i in range(6)] for t, (f, b) in BLOCK_S.items()},
    boundary_bytes=3_000,
    optimizer_s_per_parameter=1e-6,
)
MEMORY = {"fast": 100_000, "slow": 190_000}
"""Blocks are 16 kB, and 10 kB for each micro-batch in flight: a fast device has room for three of
them with one in flight, or for two with three; a slow one for all six with one."""
NODES = ({"fast": 2}, {"slow": 1, "fast": 1})
INTRA, INTER = (1e-5, 1e7), (3e-5, 1e6)
OPTIONS = SearchOptions(global_batch_size=6, recompute=False)
Explained = tuple[SearchReport, Explanation]


def nodes_of(
    *more: Mapping[str, int],
    memory: Mapping[str, int] = MEMORY,
    intra: tuple[float, float] = INTRA,
    inter: tuple[float, float] = INTER,
) -> Cluster:
    """Three fast devices with too little memory, a slow one, and a slow network."""
    return cluster_of(*NODES, *more, memory=memory, intra=intra, inter=inter)


def explained(cluster: Cluster, options: SearchOptions = OPTIONS) -> Explained:
    """A plan, proved to be the best, and its explanation."""
    report = search(PROFILE, cluster, options)
    assert report.status == "optimal"
    return report, explain(report, PROFILE, cluster, SearchAgain(PROFILE, cluster, options))


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """The usual one."""
    return nodes_of()


@pytest.fixture(scope="module")
def answer(cluster: Cluster) -> Explained:
    """Its plan, explained."""
    return explained(cluster)


def direct_s(cluster: Cluster) -> float:
    """Step time of a search of its own [s]."""
    report = search(PROFILE, cluster, OPTIONS)
    assert report.status == "optimal"
    return report.step_time_s


@pytest.mark.parametrize("room", [MEMORY, {"fast": 10**9, "slow": 10**9}])
def test_the_busiest_stage_of_the_pipeline_that_ends_last_limits(room: dict[str, int]) -> None:
    cluster = nodes_of(memory=room)
    report, explanation = explained(cluster, replace(OPTIONS, global_batch_size=9))
    simulation = simulate(report.plan, PROFILE, cluster)
    ends = simulation.pipeline_end_s
    (last,) = (i for i, end_s in enumerate(ends) if end_s == max(ends))
    pipeline = report.plan.pipelines[last]
    works = []
    for stage in pipeline.stages:
        device_type = cluster.devices[stage.devices[0]].type
        entries = [e for e in PROFILE.compute if e.device == device_type][slice(*stage.blocks)]
        works.append((sum(e.forward_s for e in entries), sum(e.backward_s for e in entries)))
    limit = explanation.limit
    assert (limit.pipeline, limit.stage) == (last, works.index(max(works, key=sum)))
    stage = pipeline.stages[limit.stage]
    assert (limit.devices, limit.blocks) == (stage.devices, stage.blocks)
    assert limit.device_type == cluster.devices[stage.devices[0]].type
    assert (limit.forward_s, limit.backward_s) == pytest.approx(works[limit.stage])
    assert limit.micro_batches == pipeline.micro_batches
    assert limit.busy_s == pytest.approx(pipeline.micro_batches * sum(works[limit.stage]))
    assert limit.busy_s + limit.idle_s == pytest.approx(simulation.step_time_s)
    assert explanation.terms["compute_s"] == pytest.approx(limit.busy_s)


def test_terms_are_parts_of_the_step(cluster: Cluster, answer: Explained) -> None:
    report, explanation = answer
    step_s = simulate(report.plan, PROFILE, cluster).step_time_s
    assert explanation.step_time_s == step_s
    assert sum(explanation.terms.values()) == pytest.approx(step_s)
    assert all(term_s >= 0 for term_s in explanation.terms.values())
    # Two blocks of a thousand parameters on each device, at a microsecond a parameter.
    assert explanation.terms["optimizer_s"] == pytest.approx(0.002)


def test_memory_terms_are_those_of_every_device(cluster: Cluster, answer: Explained) -> None:
    report, explanation = answer
    needed = {device: m.total_bytes for m in explanation.memory for device in m.devices}
    assert needed == peak_bytes(report.plan, PROFILE, cluster)
    for memory in explanation.memory:
        assert sum(memory.terms.values()) == memory.total_bytes
        assert memory.capacity_bytes == MEMORY[memory.device_type]
    assert [m.num_in_flight for m in explanation.memory] == [3, 2, 1]


def test_what_memory_decides_is_the_plan_with_twice_as_much(
    cluster: Cluster, answer: Explained
) -> None:
    report, explanation = answer
    # No slow device is in the plan, so its memory is no question.
    (decision,) = explanation.memory_decisions
    assert decision.device_type == "fast"
    roomy = nodes_of(memory=MEMORY | {"fast": 2 * MEMORY["fast"]})
    then = search(PROFILE, roomy, OPTIONS)
    assert decision.step_time_s == then.step_time_s < report.step_time_s
    assert decision.gain == pytest.approx(1 - then.step_time_s / report.step_time_s)
    assert (decision.pipelines, decision.pipelines_then) == (1, len(then.plan.pipelines))
    held, held_then = (
        {d: s.blocks[1] - s.blocks[0] for p in plan.pipelines for s in p.stages for d in s.devices}
        for plan in (report.plan, then.plan)
    )
    more = {d: (n, held_then[d]) for d, n in held.items() if held_then.get(d, 0) > n}
    assert more
    assert {c.device: (c.blocks, c.blocks_then) for c in decision.stages} == more


def test_memory_that_is_enough_decides_nothing() -> None:
    roomy = nodes_of(memory={"fast": 10**9, "slow": 10**9})
    _, explanation = explained(roomy)
    assert {d.device_type for d in explanation.memory_decisions} <= {"fast", "slow"}
    for decision in explanation.memory_decisions:
        assert decision.gain == 0
        assert decision.stages == ()
        assert decision.pipelines_then == decision.pipelines
        assert decision.step_time_s == explanation.step_time_s


def test_changes_are_searched_and_sorted(answer: Explained) -> None:
    report, explanation = answer
    changed = {
        "one fast more, in a new node": nodes_of({"fast": 1}),
        "one slow more, in a new node": nodes_of({"slow": 1}),
        "25 % more memory on every fast": nodes_of(memory=MEMORY | {"fast": 125_000}),
        "25 % more memory on every slow": nodes_of(memory=MEMORY | {"slow": 237_500}),
        "2 x the bandwidth between nodes": nodes_of(inter=(INTER[0], 2 * INTER[1])),
        "2 x the bandwidth inside nodes": nodes_of(intra=(INTRA[0], 2 * INTRA[1])),
    }
    times = {words: direct_s(cluster) for words, cluster in changed.items()}
    found = {c.words: c.step_time_s for c in explanation.changes}
    assert found == pytest.approx(times)
    for change in explanation.changes:
        gain = 1 - times[change.words] / report.step_time_s
        assert change.gain == pytest.approx(gain if gain > 0.001 else 0.0)
    assert all(a.gain >= b.gain for a, b in itertools.pairwise(explanation.changes))
    best = explanation.best_change
    assert best is not None
    assert best.words == min(times, key=lambda words: times[words])
    # Otherwise the order would tell nothing: four of them help, no two by the same.
    assert len({c.gain for c in explanation.changes if c.gain > 0}) == 4
    assert explanation.num_searches == len(times) + len(explanation.memory_decisions)


def test_where_nothing_helps_no_change_is_named() -> None:
    """One block and one sample: a device more has nothing to do, and nothing is sent."""
    profile = profile_of(blocks={"fast": [(0.01, 0.02)]})
    cluster = cluster_of({"fast": 1})
    options = SearchOptions(global_batch_size=1)
    report = search(profile, cluster, options)
    explanation = explain(report, profile, cluster, SearchAgain(profile, cluster, options))
    assert explanation.best_change is None
    assert {c.gain for c in explanation.changes} == {0.0}
    assert {c.step_time_s for c in explanation.changes} == {report.step_time_s}
    assert explanation.limit.idle_s == pytest.approx(0, abs=1e-12)


def test_devices_that_are_left_out_stand_by_their_reason(
    cluster: Cluster, answer: Explained
) -> None:
    report, explanation = answer
    ((reason, devices),) = explanation.unused.items()
    assert devices == ("n1:0",)
    assert "would not speed up the plan" in reason
    kept = replace(OPTIONS, excluded=frozenset({"n0:1"}))
    _, without = explained(cluster, kept)
    assert without.unused["excluded"] == ("n0:1",)
    # Questions leave out what the search was told to leave out.
    more = nodes_of({"fast": 1})
    (then_s,) = (c.step_time_s for c in without.changes if c.words.startswith("one fast more"))
    assert then_s == search(PROFILE, more, kept).step_time_s
    assert report.rivals == explanation.baselines
