"""Any plan trains the same model as one process: loss, gradient norm, every parameter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from distributed.conftest import RunPlan
from distributed.reference import Reference, train_in_one_process
from distributed.training import (
    SEQ_LEN,
    RandomTokens,
    RankResult,
    make_pipeline,
    make_plan,
    make_spec,
    merged,
    random_plan,
    widths_of,
)

from eth_cli.launch.config import RunOptions
from eth_cli.launch.dataset import IGNORED_LABEL, WindowedTokens
from eth_cli.launch.order import SampleOrder
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan

pytestmark = pytest.mark.distributed

RTOL = 1e-5
ATOL = 1e-6
"""For weights whose exact gradient is zero or nearly so, such as the bias of keys: there AdamW
divides rounding noise (about 1e-9) by its own size plus epsilon, and so moves the weight by up to
learning_rate * noise / epsilon. ATOL is a thousandth of what one update moves other weights."""
EPSILON = 1e-5
"""Keeps that below ATOL; still far below the gradients themselves, of about 1e-2 each."""

SEEDS = range(45)
NUM_SAMPLES = 50


def check(
    results: list[RankResult],
    reference: Reference,
    *,
    are_equal: bool = True,
) -> None:
    """Every rank saw the reference's losses and norms; all parameters equal its own."""
    for result in results:
        assert [m.loss for m in result.metrics] == pytest.approx(reference.losses, rel=RTOL)
        norms = [m.grad_norm for m in result.metrics]
        assert norms == pytest.approx(reference.grad_norms, rel=RTOL)
    weights = merged(results, "weights", are_equal=are_equal)
    assert weights.keys() == reference.weights.keys()
    for name, weight in weights.items():
        expected = reference.weights[name]
        torch.testing.assert_close(weight, expected, rtol=RTOL, atol=ATOL, msg=f"{name} differs")


def check_plan(
    run_plan: RunPlan,
    plan: Plan,
    spec: ModelSpec,
    *,
    source: Any = None,
    **options: Any,
) -> list[RankResult]:
    """Train by a plan and in one process, and compare."""
    chosen = RunOptions(
        **{"steps": 3, "clip": 0.5, "warmup_steps": 1, "epsilon": EPSILON, **options}
    )
    source = source or RandomTokens(NUM_SAMPLES)
    results = run_plan(plan, spec, chosen, source)
    # A CPU's vector code rounds the ends of tensors differently, and widths differ in these.
    are_equal = plan.sharded_optimizer or len(widths_of(plan)) == 1
    check(results, reference_of(plan, spec, chosen, source), are_equal=are_equal)
    return results


def reference_of(plan: Plan, spec: ModelSpec, options: RunOptions, source: Any) -> Reference:
    """The same training in one process."""
    return train_in_one_process(spec, options, source, global_batch_size=plan.global_batch_size)


def share_without_labels(plan: Plan, *, seed: int = 0) -> RandomTokens:
    """Samples of which the last pipeline gets, in the first step, only ignored labels."""
    order = SampleOrder(
        num_samples=NUM_SAMPLES, global_batch_size=plan.global_batch_size, seed=seed
    )
    last = order.batch(0)[-plan.pipelines[-1].num_samples :]
    return RandomTokens(NUM_SAMPLES, empty=last)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plan_equals_one_process(run_plan: RunPlan, seed: int) -> None:
    plan, spec = random_plan(seed)
    source = share_without_labels(plan) if seed % 2 else None
    check_plan(run_plan, plan, spec, source=source)


def test_random_plans_cover_what_matters() -> None:
    plans = [random_plan(seed) for seed in SEEDS]
    pipelines = [(p, spec) for plan, spec in plans for p in plan.pipelines]
    stages = [(s.blocks, spec) for p, spec in pipelines for s in p.stages]
    assert {len(plan.ranks) for plan, _ in plans} == {1, 2, 3, 4, 5, 6}
    assert {len(plan.pipelines) for plan, _ in plans} == {1, 2, 3}
    assert {len(p.stages) for p, _ in pipelines} == {1, 2, 3, 4}
    assert {(spec.family, spec.tied) for _, spec in plans} == {
        (family, tied) for family in ("gpt", "llama") for tied in (True, False)
    }
    assert any(p.micro_batches < len(p.stages) for p, _ in pipelines)
    assert any(p.micro_batches == len(p.stages) > 1 for p, _ in pipelines)
    assert any(blocks == (0, 1) for blocks, _ in stages)
    assert any(blocks == (spec.num_blocks - 1, spec.num_blocks) for blocks, spec in stages)
    assert any(len({p.micro_batch_size for p in plan.pipelines}) > 1 for plan, _ in plans)
    assert any(
        plan.ranks_of(0, 0)[0] > plan.ranks_of(0, 1)[0]
        for plan, _ in plans
        if len(plan.pipelines[0].stages) > 1
    )
    assert any(s.recompute for p, _ in pipelines for s in p.stages)


def test_case_1_gradient_of_uneven_shares_is_weighted_by_tokens(run_plan: RunPlan) -> None:
    spec = make_spec()
    plan = make_plan([make_pipeline([2], share=(5, 1)), make_pipeline([3], share=(3, 1))])
    options = RunOptions(steps=1, clip=None)
    source = RandomTokens(NUM_SAMPLES)
    gradients = merged(run_plan(plan, spec, options, source), "gradients")
    expected = reference_of(plan, spec, options, source).gradients
    assert max((gradients[n] - expected[n]).abs().max().item() for n in expected) < 1e-6


@pytest.mark.parametrize("share", [(12, 1), (4, 3), (1, 12)])
def test_case_6_micro_batches_with_unequal_labels_equal_one_big_batch(
    run_plan: RunPlan, share: tuple[int, int]
) -> None:
    check_plan(run_plan, make_plan([make_pipeline([2], share=share)]), make_spec())


def test_case_7_share_without_any_label(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([1, 3], share=(3, 2)), make_pipeline([2], share=(1, 4))])
    source = share_without_labels(plan)
    order = SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=10, seed=0)
    assert sum(source.num_valid(i) for i in order.batch(0)[6:]) == 0
    check_plan(run_plan, plan, make_spec(), source=source)


def test_case_7_batch_without_any_label(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([2], share=(2, 1)), make_pipeline([], share=(1, 1))])
    source = RandomTokens(NUM_SAMPLES, empty=range(NUM_SAMPLES))
    results = check_plan(run_plan, plan, make_spec(), source=source)
    assert [m.loss for m in results[0].metrics] == [0.0] * 3


def test_case_9_loss_is_the_token_weighted_mean(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([], share=(n, 1)) for n in (7, 2, 1)])
    results = check_plan(run_plan, plan, make_spec(), steps=2)
    order = SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=10, seed=0)
    source = RandomTokens(NUM_SAMPLES)
    tokens = [sum(source.num_valid(i) for i in order.batch(k)) for k in range(2)]
    assert [m.tokens for m in results[0].metrics] == tokens


def test_case_12_one_micro_batch_through_three_stages(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([1, 4], share=(1, 2))])
    check_plan(run_plan, plan, make_spec())


def test_case_15_sequences_of_varying_length_over_four_stages(run_plan: RunPlan) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(2, SEQ_LEN) for _ in range(NUM_SAMPLES)]
    plan = make_plan([make_pipeline([1, 2, 4], share=(6, 1))])
    check_plan(run_plan, plan, make_spec(), source=PaddedTokens(lengths))


class PaddedTokens(RandomTokens):
    """Sequences of the given lengths, filled up to one shape."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(len(lengths))
        for row, length in enumerate(lengths):
            self._tokens[row, length:] = 0
            self._labels[row, length:] = IGNORED_LABEL


def test_case_16_as_many_micro_batches_as_stages(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([1, 3], share=(3, 1)), make_pipeline([2, 4], share=(3, 2))])
    check_plan(run_plan, plan, make_spec())


@pytest.mark.parametrize("seed", range(20))
def test_case_18_groups_of_random_plans_never_hang(run_plan: RunPlan, seed: int) -> None:
    rng = random.Random(seed)
    shares = [(rng.randint(1, 4), rng.randint(1, 2)) for _ in range(3)]
    cuts = [sorted(rng.sample(range(1, 5), n - 1)) for n in (2, 3, 1)]
    plan = make_plan(
        [make_pipeline(c, share=s) for c, s in zip(cuts, shares, strict=True)], shuffle=rng
    )
    options = RunOptions(steps=2)
    results = run_plan(
        plan, make_spec(tied=bool(seed % 2)), options, RandomTokens(NUM_SAMPLES), timeout_s=60
    )
    assert [len(r.metrics) for r in results] == [2] * 6


def test_case_19_hundred_steps_with_overlapping_groups(run_plan: RunPlan) -> None:
    plan = make_plan(
        [
            make_pipeline([1, 3], share=(2, 1)),
            make_pipeline([2], share=(3, 1)),
            make_pipeline([], share=(1, 2)),
        ]
    )
    owners = {segment.owners for segment in plan.segments}
    assert len(owners) == 4  # every segment has another set of owners, and each two overlap
    results = check_plan(run_plan, plan, make_spec(), steps=100, learning_rate=1e-4)
    assert len(results[0].metrics) == 100


def test_case_27_tied_weights_on_two_unequal_pipelines(run_plan: RunPlan) -> None:
    plan = make_plan([make_pipeline([1, 4], share=(3, 1)), make_pipeline([2], share=(2, 2))])
    results = check_plan(run_plan, plan, make_spec(tied=True), steps=5)
    copies = [
        r.weights["blocks.0.token.weight"] for r in results if "blocks.0.token.weight" in r.weights
    ]
    assert len(copies) == 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_case_29_clip_norm_counts_each_parameter_once(run_plan: RunPlan) -> None:
    spec = make_spec(tied=True)
    options = RunOptions(steps=3, clip=0.5)
    source = RandomTokens(NUM_SAMPLES)
    plans = [
        make_plan([make_pipeline([], share=(6, 1))]),
        make_plan([make_pipeline([2], share=(3, 2))]),
        make_plan([make_pipeline([1], share=(2, 2)), make_pipeline([4], share=(2, 1))]),
    ]
    expected = reference_of(plans[0], spec, options, source).grad_norms
    assert min(expected) > 0.5  # clipping matters
    for plan in plans:
        for result in run_plan(plan, spec, options, source):
            norms = [m.grad_norm for m in result.metrics]
            assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("embedding_size", [12, 8])
def test_head_without_norm(run_plan: RunPlan, embedding_size: int) -> None:
    """As in OPT-350M. With embeddings as wide as the rest, the tied head has nothing of its own."""
    spec = make_spec(tied=True).model_copy(
        update={"final_norm": False, "post_norm": True, "embedding_size": embedding_size}
    )
    plan = make_plan([make_pipeline([2, 4], share=(3, 1)), make_pipeline([], share=(2, 2))])
    check_plan(run_plan, plan, spec)


def test_ragged_last_window_of_real_data(run_plan: RunPlan) -> None:
    tokens = torch.arange(61).remainder(23).numpy()  # 6 windows of 9, and one of 7
    source = WindowedTokens(tokens, seq_len=SEQ_LEN, digest="")
    assert source.num_samples == 7
    plan = make_plan([make_pipeline([3], share=(4, 1)), make_pipeline([], share=(1, 3))])
    check_plan(run_plan, plan, make_spec(), source=source)
