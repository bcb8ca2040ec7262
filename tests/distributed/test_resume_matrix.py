"""Every plan goes on from a checkpoint of every other: weights, moments and place in the data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import RankPool
from distributed.training import (
    RandomTokens,
    make_pipeline,
    make_plan,
    make_spec,
    merged,
    train,
)

from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.plan import Plan

pytestmark = pytest.mark.distributed

SPEC = make_spec(tied=True).model_copy(update={"num_heads": 4, "num_kv_heads": 4, "ffn_size": 21})
SOURCE = RandomTokens(31)
"""Not a multiple of the global batch of six."""
SAVED = 3


def wide(pipeline: dict[str, Any], *widths: int) -> dict[str, Any]:
    for stage, width in zip(pipeline["stages"], widths, strict=True):
        stage["width"] = width
    return pipeline


PLANS = {
    "one": make_plan([make_pipeline([], share=(3, 2))]),
    "four stages": make_plan([make_pipeline([1, 2, 4], share=(6, 1), recompute=True)]),
    "unequal": make_plan([make_pipeline([1, 3], share=(2, 2)), make_pipeline([2], share=(2, 1))]),
    "three, sharded": make_plan(
        [
            make_pipeline([3], share=(1, 2)),
            make_pipeline([], share=(3, 1)),
            make_pipeline([1], share=(1, 1)),
        ],
        sharded_optimizer=True,
    ),
    "wide": make_plan([wide(make_pipeline([2], share=(3, 2)), 4, 2)]),
    "wide beside narrow, sharded": make_plan(
        [wide(make_pipeline([2], share=(2, 2)), 2, 1), make_pipeline([1, 4], share=(1, 2))],
        sharded_optimizer=True,
    ),
}
PAIRS = [(a, b) for a in PLANS for b in PLANS]
NEXT = list(zip(PLANS, [*list(PLANS)[1:], next(iter(PLANS))], strict=True))
"""In the default run; the others are behind the marker `slow`."""
OPTIONS = RunOptions(steps=SAVED + 1, epsilon=1e-5, sample_log=True)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By plan: what it held after three steps, whose checkpoint it left, and the fourth loss."""
    found = {}
    for name, plan in PLANS.items():
        root = tmp_path_factory.mktemp("saved")
        after = run(pool, plan, root, OPTIONS.model_copy(update={"steps": SAVED}))
        more = root.with_name(root.name + "-more")
        shutil.copytree(root, more)
        last = run(pool, plan, more, OPTIONS.model_copy(update={"resume": True}))
        found[name] = (root, after, last[0].metrics[0].loss)
    return found


def run(pool: RankPool, plan: Plan, root: Path, options: RunOptions) -> Any:
    return pool.run(train, plan, SPEC, options, str(root), SOURCE, num_ranks=len(plan.ranks))


@pytest.mark.parametrize(
    ("source", "target"),
    [pair if pair in NEXT else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS],
)
def test_goes_on(
    saved: dict[str, Any], pool: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    folder, expected, loss = saved[source]
    shutil.copytree(
        RunFolder(folder).checkpoint_of(SAVED), RunFolder(tmp_path).checkpoint_of(SAVED)
    )
    resume = OPTIONS.model_copy(update={"resume": True})
    # No further step: what is held is what was loaded.
    held = run(pool, PLANS[target], tmp_path, resume.model_copy(update={"steps": SAVED}))
    for what in ("weights", "moments"):
        ours = merged(held, what)
        theirs = merged(expected, what, are_equal=False)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            # Copies in stages of other widths may differ in the last bit; one of them was saved.
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-8)
            if "wide beside" not in source:
                assert torch.equal(ours[name], tensor), name
    (metrics,) = run(pool, PLANS[target], tmp_path, resume)[0].metrics
    assert metrics.step == SAVED + 1
    assert metrics.loss == pytest.approx(loss, rel=1e-5)  # the same samples, the same weights
