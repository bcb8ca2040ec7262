"""The two baselines: how they cut, which grids they look at, whom they leave out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from unit.search.problems import cluster_of, profile_of

from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan
from eth_cli.search.baselines import even_cut
from eth_cli.search.planner import SearchOptions, compare, search

LAYERS = ("embedding", *["transformer"] * 7, "head")


@pytest.mark.parametrize(
    ("kinds", "num_stages", "edges"),
    [
        (LAYERS, 1, [0, 9]),
        (LAYERS, 2, [0, 5, 9]),  # 4 + 3 layers; embedding and head come on top
        (LAYERS, 3, [0, 4, 6, 9]),
        (LAYERS, 7, [0, 2, 3, 4, 5, 6, 7, 9]),
        (LAYERS, 8, [0, 2, 3, 4, 5, 6, 7, 8, 9]),  # fewer layers than stages: blocks count alike
        (LAYERS, 10, None),
        (("a", "b", "c", "d"), 3, [0, 2, 3, 4]),
    ],
)
def test_even_cut(kinds: tuple[str, ...], num_stages: int, edges: list[int] | None) -> None:
    cut = even_cut(kinds, num_stages)
    if edges is None:
        assert cut is None
    else:
        assert cut == tuple(itertools.pairwise(edges))


def _plan(strategy: str, memory_bytes: int = 10**9, num_blocks: int = 4, **nodes: int) -> Plan:
    blocks = {"x": [(1.0, 2.0)] * num_blocks, "y": [(2.0, 4.0)] * num_blocks}
    cluster = cluster_of(*({t: n} for t, n in nodes.items()), memory_bytes=memory_bytes)
    options = SearchOptions(global_batch_size=8, strategy=strategy)
    return search(profile_of(blocks=blocks), cluster, options).plan


def test_every_device_is_used_with_equal_shares_and_one_cut() -> None:
    for strategy in ("even", "uneven-layers"):
        plan = _plan(strategy, x=2, y=2)
        assert not plan.unused_devices
        assert len({(p.micro_batches, p.micro_batch_size) for p in plan.pipelines}) == 1
        assert len({tuple(s.blocks for s in p.stages) for p in plan.pipelines}) == 1


def test_uneven_layers_gives_the_fast_column_more() -> None:
    # Six blocks, 16 kB of parameters and 10 kB of activations each. No device holds all of them
    # (156 kB); a first stage holds four with two micro-batches in flight (144 kB).
    cuts = {}
    for strategy in ("uneven-layers", "even"):
        plan = _plan(strategy, x=2, y=2, num_blocks=6, memory_bytes=144_500)
        (cuts[strategy],) = {tuple(s.blocks for s in p.stages) for p in plan.pipelines}
    assert cuts["uneven-layers"] == ((0, 4), (4, 6))
    sizes = {stop - start for start, stop in cuts["even"]}
    assert max(sizes) - min(sizes) <= 1


def test_fewest_and_slowest_devices_are_left_out_where_no_grid_takes_all() -> None:
    # 5 devices: no number of pipelines divides 5 and 8; 5 stages are more than 4 blocks.
    plan = _plan("even", x=3, y=2)
    (unused,) = plan.unused_devices
    assert unused.device == "n1:1"
    assert "divides both 5 devices" in unused.reason


def test_no_grid_at_all_says_what_lacks() -> None:
    with pytest.raises(InfeasibleError) as caught:
        _plan("even", x=2, memory_bytes=30_000)
    assert "stage 0 (blocks 0 to 1)" in caught.value.binding
    assert "bytes are lacking" in caught.value.binding


@pytest.mark.parametrize("memory_bytes", [60_000, 100_000, 10**9])
@pytest.mark.parametrize(("x", "y"), [(1, 2), (2, 4), (3, 4), (5, 2)])
def test_uneven_layers_is_never_worse_than_even(x: int, y: int, memory_bytes: int) -> None:
    times = {}
    for strategy in ("even", "uneven-layers"):
        try:
            plan = _plan(strategy, memory_bytes=memory_bytes, num_blocks=5, x=x, y=y)
        except InfeasibleError:
            times[strategy] = float("inf")
            continue
        assert plan.predicted is not None
        times[strategy] = plan.predicted.step_time_s
    assert times["uneven-layers"] <= times["even"]


def test_uneven_layers_leaves_the_slowest_type_out_where_that_is_faster() -> None:
    # Seven devices divide nothing: one pipeline of seven stages over four blocks has no plan, and
    # four fast devices as four pipelines beat any grid that waits for the slow ones.
    plan = _plan("uneven-layers", x=4, y=3)
    assert {d.device.split(":")[0] for d in plan.unused_devices} == {"n1"}
    (reason,) = {d.reason for d in plan.unused_devices}
    assert "one configuration over" in reason
    assert "takes" in reason


def test_like_devices_on_different_nodes_are_placed_by_column_too() -> None:
    # A device holds one block, so a pipeline has two stages. Inside a node a boundary costs much
    # less than a sync (1e3 against 4e6 bytes), so the owners of a segment belong together.
    profile = profile_of(
        blocks={"x": [(0.01, 0.02)] * 2},
        parameters=[1_000_000] * 2,
        activations=[1_000] * 2,
        boundary_bytes=1_000,
    )
    cluster = cluster_of({"x": 2}, {"x": 2}, memory_bytes=17_000_000, inter=(1e-5, 1e7))
    options = SearchOptions(global_batch_size=8)
    answers = compare(profile, cluster, options)
    times = set()
    for report in answers.values():
        assert not isinstance(report, InfeasibleError)
        times.add(report.step_time_s)
        for pipeline in report.plan.pipelines:
            first, second = (stage.devices[0].split(":")[0] for stage in pipeline.stages)
            assert first != second
    assert len(times) == 1  # like devices, even work: there is nothing to gain over a plain grid


def test_level_shares_follow_the_speeds_of_the_same_grid() -> None:
    """Pipelines of one stage, x twice as fast as y: 12 samples are 4, 4, 2, 2 instead of 3 each."""
    blocks = {"x": [(1.0, 2.0)] * 4, "y": [(2.0, 4.0)] * 4}
    cluster = cluster_of({"x": 2}, {"y": 2})
    options = SearchOptions(global_batch_size=12, strategy="uneven-layers", max_pipelines=4)
    equal = search(profile_of(blocks=blocks), cluster, options)
    level = search(profile_of(blocks=blocks), cluster, replace(options, level_shares=True))
    assert len({p.micro_batches for p in equal.plan.pipelines}) == 1
    shares = {p.stages[0].devices[0]: p.micro_batches for p in level.plan.pipelines}
    assert shares == {"n0:0": 4, "n0:1": 4, "n1:0": 2, "n1:1": 2}
    assert level.step_time_s == pytest.approx(4 * 4 * 3.0, rel=1e-3)
    assert level.step_time_s < equal.step_time_s


def test_level_shares_stay_equal_where_more_in_flight_do_not_fit() -> None:
    # Three blocks of 16 kB, one a device, and 10 kB for each micro-batch in flight: 3 and 1 of the
    # four samples (of x x x and y y y) put three in flight on the first x, 2 and 2 (of x x y and
    # x y y) put two there.
    blocks = {"x": [(1.0, 2.0)] * 3, "y": [(1.5, 3.0)] * 3}
    options = SearchOptions(global_batch_size=4, strategy="uneven-layers", level_shares=True)
    for room, shares, step_s in ((46_077, [3, 1], 5 * 3.0), (46_076, [2, 2], 3.0 + 3 * 4.5)):
        cluster = cluster_of({"x": 3}, {"y": 3}, memory_bytes=room)
        report = search(profile_of(blocks=blocks), cluster, options)
        assert [p.micro_batches for p in report.plan.pipelines] == shares
        assert report.step_time_s == pytest.approx(step_s, rel=1e-3)
