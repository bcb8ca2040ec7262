"""The simulator against schedules drawn by hand, the closed form, and its own terms."""

from __future__ import annotations

import itertools

import pytest
from builders import make_cluster, make_plan, make_profile
from unit.search.problems import cluster_of, plan_of, profile_of

from eth_cli.errors import ConfigError
from eth_cli.events import Span
from eth_cli.schedule import Op, pipeline_order
from eth_cli.search.cost import CostModel
from eth_cli.search.placed import from_plan
from eth_cli.search.simulate import Simulation, simulate
from eth_cli.search.timeline import (
    ComputeStep,
    PipelineTimes,
    compute_steps,
    period_s,
    run_pipeline,
    trace_pipeline,
)


def _starts(simulation: Simulation, name: str, rank: int) -> list[float]:
    spans = [s for s in simulation.spans if s.name == name and s.rank == rank]
    return [span.start_s for span in sorted(spans, key=lambda s: s.micro_batch or 0)]


def test_two_stages_three_micro_batches_by_hand() -> None:
    # Stage 0: f 1, b 2; stage 1: f 3, b 4; no transfer time.
    #  t   0 1 2 3 4 5 6 7 8 9 ...
    #  s0  F0 F1 . . . . . . B0@8 F2@10 ... B1@15, B2@22
    #  s1  . F0@1-4 B0@4-8 F1@8-11 B1@11-15 F2@15-18 B2@18-22
    profile = profile_of(blocks={"x": [(1.0, 2.0), (3.0, 4.0)]})
    cluster = cluster_of({"x": 2}, intra=(0.0, 1e15))
    simulation = simulate(plan_of((3, [(0, 1, "n0:0"), (1, 2, "n0:1")])), profile, cluster)
    assert _starts(simulation, "F", 0) == [0, 1, 10]
    assert _starts(simulation, "B", 0) == [8, 15, 22]
    assert _starts(simulation, "F", 1) == [1, 8, 15]
    assert _starts(simulation, "B", 1) == [4, 11, 18]
    assert simulation.step_time_s == 24
    assert simulation.terms == {
        "compute_s": 21,
        "bubble_s": 3,
        "p2p_s": 0,
        "gradsync_s": 0,
        "optimizer_s": 0,
    }


def test_transfers_delay_the_receiver_and_never_the_sender() -> None:
    # As above with transfers of 0.5 each way, for 5 bytes at 10 bytes a second.
    profile = profile_of(blocks={"x": [(1.0, 2.0), (3.0, 4.0)]}, boundary_bytes=5)
    cluster = cluster_of({"x": 2}, intra=(0.0, 10.0))
    simulation = simulate(plan_of((2, [(0, 1, "n0:0"), (1, 2, "n0:1")])), profile, cluster)
    assert _starts(simulation, "F", 0) == [0, 1]
    assert _starts(simulation, "F", 1) == [1.5, 8.5]
    assert _starts(simulation, "B", 1) == [4.5, 11.5]
    assert _starts(simulation, "B", 0) == [9.0, 16.0]
    assert simulation.step_time_s == 18
    assert simulation.terms["p2p_s"] == 1


def test_a_boundary_carries_one_transfer_at_a_time() -> None:
    # Forwards end at 1 and 2; transfers of 5 s leave one after the other and arrive at 6 and 11.
    times = PipelineTimes((1.0, 1.0), (1.0, 1.0), (5.0,), (0.5,))
    run = trace_pipeline(times, 2)
    steps = compute_steps(2, 2)
    starts = dict(zip(steps, run.step_starts_s, strict=True))
    assert starts[ComputeStep(1, True, 0)] == 6
    assert starts[ComputeStep(1, True, 1)] == 11


def test_case_12_fewer_micro_batches_than_stages() -> None:
    profile = profile_of(blocks={"x": [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]})
    cluster = cluster_of({"x": 3}, intra=(0.0, 1e15))
    stages = [(0, 1, "n0:0"), (1, 2, "n0:1"), (2, 3, "n0:2")]
    assert simulate(plan_of((1, stages)), profile, cluster).step_time_s == 21
    # Two micro-batches: the last stage works 4 - 9, 9 - 15, 15 - 20, 20 - 26, then 4 and 2 back.
    assert simulate(plan_of((2, stages)), profile, cluster).step_time_s == 32


def test_gradient_sync_is_launched_by_block_and_hidden_or_not() -> None:
    # One stage a pipeline, backward 1 s a block: block 1 is done at 4 + 1, block 0 at 4 + 2.
    # Each bucket: 2 owners, 1,000 parameters, 4,000 bytes: 2 (2 - 1) x (0 + 2,000 / 8,000) = 0.5 s.
    profile = profile_of(blocks={"x": [(1.0, 1.0), (1.0, 1.0)]}, optimizer_s_per_parameter=1e-4)
    cluster = cluster_of({"x": 3}, intra=(0.0, 8_000.0))
    apart = plan_of((1, [(0, 2, "n0:0")]), (1, [(0, 1, "n0:1"), (1, 2, "n0:2")]))
    simulation = simulate(apart, profile, cluster)
    spans = [s for s in simulation.spans if s.name == "SYNC"]
    assert [(s.start_s, s.stop_s, s.rank, s.blocks) for s in spans] == [
        (3.0, 3.5, 0, (1, 2)),
        (3.0, 3.5, 2, (1, 2)),
        (4.0, 4.5, 0, (0, 1)),
        (4.0, 4.5, 1, (0, 1)),
    ]
    assert simulation.terms["gradsync_s"] == 0.5
    # Rank 0 holds both blocks: 2,000 parameters at 1e-4 s.
    assert simulation.terms["optimizer_s"] == pytest.approx(0.2)
    assert simulation.step_time_s == pytest.approx(4.7)
    # Without overlap rank 0 launches both buckets at 4, one after the other.
    late = simulate(apart, profile, cluster, overlap=False)
    assert late.terms["gradsync_s"] == 1.0


def test_tied_weight_is_synced_once_over_all_its_owners_and_last() -> None:
    profile = profile_of(
        blocks={"x": [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]},
        parameters=[1_000, 500, 900],
        tied=(0, 2),
        tied_parameters=600,
    )
    cluster = cluster_of({"x": 3}, intra=(0.0, 8_000.0))
    plan = plan_of((1, [(0, 1, "n0:0"), (1, 3, "n0:1")]), (1, [(0, 3, "n0:2")]))
    simulation = simulate(plan, profile, cluster)
    rank_2 = [s for s in simulation.spans if s.name == "SYNC" and s.rank == 2]
    # Segments [1, 3) and [0, 1) without the tied part, then the tied bucket over three owners.
    assert [s.blocks for s in rank_2] == [(1, 3), (0, 1), (0, 3)]
    lengths = [s.duration_s for s in rank_2]
    assert lengths[0] == pytest.approx(2 * (500 + 300) * 4 / 2 / 8_000)
    assert lengths[1] == pytest.approx(2 * 400 * 4 / 2 / 8_000)
    assert lengths[2] == pytest.approx(4 * 600 * 4 / 3 / 8_000)
    ranks = {s.rank for s in simulation.spans if s.name == "SYNC" and s.blocks == (0, 3)}
    assert ranks == {0, 1, 2}


def test_a_single_pipeline_still_syncs_a_weight_tied_over_two_stages() -> None:
    profile = profile_of(blocks={"x": [(1.0, 1.0), (1.0, 1.0)]}, tied=(0, 1), tied_parameters=400)
    cluster = cluster_of({"x": 2}, intra=(0.0, 8_000.0))
    apart = simulate(plan_of((1, [(0, 1, "n0:0"), (1, 2, "n0:1")])), profile, cluster)
    assert apart.terms["gradsync_s"] == pytest.approx(2 * 400 * 4 / 2 / 8_000)
    together = simulate(plan_of((1, [(0, 2, "n0:0")])), profile, cluster)
    assert together.terms["gradsync_s"] == 0


def test_buckets_of_one_node_share_its_nic() -> None:
    # Two stages on node 0 sync with two on node 1 at once: each ring gets half the rate.
    profile = profile_of(blocks={"x": [(1.0, 1.0), (1.0, 1.0)]})
    cluster = cluster_of({"x": 2}, {"x": 2}, intra=(0.0, 1e15), inter=(0.0, 8_000.0))
    plan = plan_of((1, [(0, 1, "n0:0"), (1, 2, "n0:1")]), (1, [(0, 1, "n1:0"), (1, 2, "n1:1")]))
    sync = {s.blocks: s for s in simulate(plan, profile, cluster).spans if s.name == "SYNC"}
    # Alone 0.5 s; block 1 goes out at 3, block 0 at 4: no sharing.
    assert (sync[1, 2].start_s, sync[1, 2].stop_s) == (3.0, 3.5)
    together = simulate(plan, profile, cluster, overlap=False)
    assert together.step_time_s == 4.5
    slow = cluster_of({"x": 2}, {"x": 2}, intra=(0.0, 1e15), inter=(0.0, 2_000.0))
    sync = {s.blocks: s for s in simulate(plan, profile, slow).spans if s.name == "SYNC"}
    # 2 s alone. From 4 on both run at half rate: block 1 has 1 s left, ends at 6; then block 0.
    assert (sync[1, 2].start_s, sync[1, 2].stop_s) == (3.0, 6.0)
    assert (sync[0, 1].start_s, sync[0, 1].stop_s) == (4.0, 7.0)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 16])
def test_equals_the_closed_form_where_that_is_exact(num_stages: int, micro_batches: int) -> None:
    profile = profile_of(blocks={"x": [(0.25, 0.5)] * num_stages})
    cluster = cluster_of({"x": num_stages}, intra=(0.0, 1e9))
    plan = plan_of((micro_batches, [(s, s + 1, f"n0:{s}") for s in range(num_stages)]))
    model = CostModel(profile, cluster)
    placed = from_plan(plan, cluster)
    simulation = simulate(plan, profile, cluster)
    expected = (num_stages + micro_batches - 1) * 0.75
    assert simulation.step_time_s == expected
    assert model.closed_form(placed).total_s == pytest.approx(expected)


def test_period_is_the_pace_of_a_long_run() -> None:
    times = PipelineTimes((1.0, 0.7, 1.3), (2.1, 1.9, 1.1), (0.3, 0.2), (0.25, 0.4))
    pace = (run_pipeline(times, 400).end_s - run_pipeline(times, 200).end_s) / 200
    assert pace == pytest.approx(period_s(times), rel=1e-3)


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(1, 3), (2, 1), (3, 2), (4, 4), (4, 9)])
def test_steps_are_the_compute_actions_of_the_executed_lists(
    num_stages: int, micro_batches: int
) -> None:
    steps = compute_steps(num_stages, micro_batches)
    for stage, actions in enumerate(pipeline_order(num_stages, micro_batches)):
        executed = [(a.op is Op.FORWARD, a.micro_batch) for a in actions if a.op.is_compute]
        assert [(f, m) for s, f, m in steps if s == stage] == executed


def test_terms_sum_to_the_step_time_and_spans_do_not_overlap_on_a_device() -> None:
    simulation = simulate(make_plan(), make_profile(), make_cluster())
    assert sum(simulation.terms.values()) == pytest.approx(simulation.step_time_s, rel=1e-12)
    assert simulation.tokens_per_s == pytest.approx(8 * 128 / simulation.step_time_s)
    for rank in range(4):
        compute: list[Span] = [
            s for s in simulation.spans if s.rank == rank and s.name in ("F", "B", "OPTIMIZER")
        ]
        for before, after in itertools.pairwise(compute):
            assert before.stop_s <= after.start_s + 1e-12
    assert {s.num_in_flight for s in simulation.stages} == {1, 2}
    assert all(0 < s.busy_share <= 1 for s in simulation.stages)
    assert not simulation.excesses


def test_recompute_adds_a_forward_and_saves_memory() -> None:
    profile = profile_of(blocks={"x": [(1.0, 2.0), (3.0, 4.0)]}, activations=[50_000, 90_000])
    cluster = cluster_of({"x": 1})
    kept = simulate(plan_of((2, [(0, 2, "n0:0")])), profile, cluster)
    again = simulate(plan_of((2, [(0, 2, "n0:0")]), recompute=True), profile, cluster)
    assert again.step_time_s == kept.step_time_s + 2 * 4.0
    # Inputs of both blocks are a tenth of 140,000; the larger block is recomputed whole.
    assert kept.stages[0].memory.activations_bytes == 140_000
    assert again.stages[0].memory.activations_bytes == 14_000
    assert again.stages[0].memory.recompute_bytes == 90_000


def test_tensor_parallel_group_uses_its_own_entries() -> None:
    profile = profile_of(
        blocks={"x": [(1.0, 2.0), (3.0, 4.0)]}, tensor_parallel=(1, 2, 4), parameters=[1_001, 501]
    )
    cluster = cluster_of({"x": 4}, intra=(0.0, 8_000.0))
    wide = simulate(plan_of((2, [(0, 2, "n0:0 n0:1 n0:2 n0:3")])), profile, cluster)
    assert wide.step_time_s == 2 * 10 / 2
    assert len(wide.memory) == 4
    assert wide.stages[0].memory.parameters_bytes == 16 * 376  # 1,502 / 4 rounded up
    pairs = plan_of((1, [(0, 2, "n0:0 n0:1")]), (1, [(0, 2, "n0:2 n0:3")]))
    # Both halves of 1,502 parameters at once: 2 (2 - 1) x 1,502 x 4 / (2 x 2) / 8,000 s.
    assert simulate(pairs, profile, cluster).terms["gradsync_s"] == pytest.approx(0.3755)
    assert {s.rank for s in simulate(pairs, profile, cluster).spans if s.name == "SYNC"} == {
        0,
        1,
        2,
        3,
    }


def test_missing_entry_names_what_is_missing_and_what_exists() -> None:
    profile = profile_of(blocks={"x": [(1.0, 2.0)]}, micro_batch_sizes=(1, 2))
    with pytest.raises(
        ConfigError, match="device x, block k0, tensor_parallel 1, micro_batch_size 3"
    ):
        simulate(plan_of((1, [(0, 1, "n0:0")]), size=3), profile, cluster_of({"x": 1}))
    with pytest.raises(ConfigError, match="tensor_parallel 1 with micro_batch_size 1, tensor"):
        simulate(plan_of((1, [(0, 1, "n0:0 n0:1")])), profile, cluster_of({"x": 2}))
    with pytest.raises(ConfigError, match=r"device y, block k0.*it has block k0 of x"):
        simulate(plan_of((1, [(0, 1, "n0:0")])), profile, cluster_of({"y": 1}))


def test_plan_of_another_model_or_dtype_is_refused() -> None:
    profile = profile_of(blocks={"x": [(1.0, 2.0), (1.0, 3.0)]})
    cluster = cluster_of({"x": 1})
    with pytest.raises(ConfigError, match="cover 1 blocks, but the profile of table has 2"):
        simulate(plan_of((1, [(0, 1, "n0:0")])), profile, cluster)
    plan = plan_of((1, [(0, 2, "n0:0")]))
    other = plan.model_copy(update={"seq_len": 9, "dtype": "bf16"})
    with pytest.raises(ConfigError) as caught:
        simulate(other, profile, cluster)
    assert [fault.field for fault in caught.value.faults] == ["seq_len", "dtype"]
    with pytest.raises(ConfigError, match="n7:0"):
        simulate(plan_of((1, [(0, 2, "n7:0")])), profile, cluster)


def test_over_capacity_names_device_stage_and_bytes() -> None:
    profile = profile_of(
        blocks={"x": [(1.0, 2.0), (3.0, 4.0)]}, parameters=[1_000, 3_000], boundary_bytes=11
    )
    cluster = cluster_of({"x": 2}, memory_bytes=50_000)
    simulation = simulate(plan_of((2, [(0, 1, "n0:0"), (1, 2, "n0:1")])), profile, cluster)
    (excess,) = simulation.excesses
    assert (excess.device, excess.device_type, excess.pipeline, excess.stage) == ("n0:1", "x", 0, 1)
    assert excess.needed_bytes == 16 * 3_000 + 10_000 + 2 * 11 + 77
    assert excess.lacking_bytes == excess.needed_bytes - 50_000
    assert "8099 bytes are lacking" in str(excess)


def test_sharded_optimizer_divides_update_and_state() -> None:
    profile = profile_of(blocks={"x": [(1.0, 2.0)]}, optimizer_s_per_parameter=1e-3)
    memory = profile.memory.model_copy(update={"optimizer_bytes_per_parameter": 8.0})
    profile = profile.model_copy(update={"memory": memory})
    cluster = cluster_of({"x": 2})
    plan = plan_of((1, [(0, 1, "n0:0")]), (1, [(0, 1, "n0:1")]))
    whole = simulate(plan, profile, cluster)
    parts = simulate(plan.model_copy(update={"sharded_optimizer": True}), profile, cluster)
    assert whole.terms["optimizer_s"] == pytest.approx(1.0)
    assert parts.terms["optimizer_s"] == pytest.approx(0.5)
    assert whole.stages[0].memory.parameters_bytes == 16_000
    assert parts.stages[0].memory.parameters_bytes == 12_000


def test_gradients_travel_in_fp32_whatever_the_blocks_compute_in() -> None:
    cluster = cluster_of({"x": 2}, intra=(0.0, 1_000))
    profile = profile_of(blocks={"x": [(1.0, 2.0)]}, parameters=[500])
    plan = plan_of((1, [(0, 1, "n0:0")]), (1, [(0, 1, "n0:1")]))
    for dtype in ("fp32", "bf16", "fp16"):
        figures = simulate(
            plan.model_copy(update={"dtype": dtype}),
            profile.model_copy(update={"dtype": dtype}),
            cluster,
        )
        assert figures.terms["gradsync_s"] == 2 * 500 * 4 / 2 / 1_000


def test_boundaries_of_several_pipelines_share_their_nodes_nics() -> None:
    profile = profile_of(blocks={"x": [(1.0, 1.0), (1.0, 1.0)]}, boundary_bytes=10**8)
    cluster = cluster_of({"x": 2}, {"x": 2}, inter=(0.25, 2e8))
    model = CostModel(profile, cluster)
    first = (2, [(0, 1, "n0:0"), (1, 2, "n1:0")])
    second = (2, [(0, 1, "n0:1"), (1, 2, "n1:1")])
    opposite = (2, [(0, 1, "n1:1"), (1, 2, "n0:1")])
    for other, send_s in ((second, 0.25 + 1.0), (opposite, 0.25 + 0.5)):
        pipelines = from_plan(plan_of(first, other), cluster)
        for times in model.evaluate(pipelines).times:
            assert times.send_forward_s == times.send_backward_s == (send_s,)
        assert model.times(pipelines[0]).send_forward_s == (0.25 + 0.5,)
