"""This rank's part of a batch, and the learning rate: never does more depend on the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributed.training import SEQ_LEN, RandomTokens, make_pipeline, make_plan

from eth_cli.launch.config import RunOptions
from eth_cli.launch.order import SampleOrder
from eth_cli.launch.runtime.data import BatchReader
from eth_cli.launch.runtime.optim import learning_rate
from eth_cli.plan import Plan


def read(plan: Plan, pipeline: int, *, first: bool, last: bool) -> BatchReader:
    return BatchReader(
        RandomTokens(30),
        plan=plan,
        pipeline=pipeline,
        is_first=first,
        is_last=last,
        seed=0,
        device=torch.device("cpu"),
    )


def test_pipelines_take_consecutive_ranges_and_stages_only_what_they_need() -> None:
    plan = make_plan([make_pipeline([1, 3], share=(2, 2)), make_pipeline([], share=(3, 1))])
    order = SampleOrder(num_samples=30, global_batch_size=7, seed=0).batch(2)
    source = RandomTokens(30)
    num_valid = sum(source.num_valid(sample) for sample in order)

    first = read(plan, 0, first=True, last=False).read(2)
    middle = read(plan, 0, first=False, last=False).read(2)
    last = read(plan, 0, first=False, last=True).read(2)
    alone = read(plan, 1, first=True, last=True).read(2)
    assert first.samples == middle.samples == last.samples == order[:4]
    assert alone.samples == order[4:]
    assert [b.num_valid for b in (first, middle, last, alone)] == [num_valid] * 4
    assert [b.tokens is not None for b in (first, middle, last, alone)] == [
        True,
        False,
        False,
        True,
    ]
    assert [b.labels is not None for b in (first, middle, last, alone)] == [
        False,
        False,
        True,
        True,
    ]
    assert alone.tokens is not None
    assert alone.tokens.shape == (3, SEQ_LEN)
    assert alone.tokens.dtype == torch.int64
    assert np.array_equal(alone.tokens[1].numpy(), source.sample(order[5])[0])


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    options = RunOptions(steps=12, learning_rate=0.4, warmup_steps=4, final_learning_rate_ratio=0.1)
    rates = [learning_rate(options, step) for step in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[8] == pytest.approx(0.4 * (0.1 + 0.9 / 2))  # half way
    assert rates[12] == pytest.approx(0.04)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    constant = RunOptions(steps=5, learning_rate=0.4, final_learning_rate_ratio=1.0)
    assert {learning_rate(constant, step) for step in range(5)} == {0.4}
