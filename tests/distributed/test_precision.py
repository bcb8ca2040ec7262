"""Training in 16 bits: close to fp32, fp32 masters, one loss scale on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.conftest import RunPlan
from distributed.ranks import RankPool
from distributed.test_parity import EPSILON, NUM_SAMPLES, reference_of
from distributed.training import RandomTokens, make_pipeline, make_plan, make_spec, merged

from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.launch import checkpoints, precision
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.runtime.scaling import FIRST_SCALE, LossScale
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.model import ModelSpec
from eth_cli.models.init import initial_value
from eth_cli.plan import Plan

pytestmark = pytest.mark.distributed

TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3}
"""Of losses and gradient norms against fp32, relative: a few units of the last of 8 or 11 bits."""
WEIGHTS_TOLERANCE = {"bf16": 0.2, "fp16": 0.04}
"""Of three updates together, relative."""
OPTIONS = RunOptions(steps=3, clip=0.5, warmup_steps=1, epsilon=EPSILON)


def plan_of(dtype: str, **fields: Any) -> Plan:
    pipelines = [make_pipeline([1, 3], share=(3, 1)), make_pipeline([2], share=(2, 2))]
    pipelines[1]["stages"][0]["width"] = 2
    return make_plan(pipelines, dtype=dtype, **fields)


def four_heads() -> ModelSpec:
    return make_spec(tied=True).model_copy(update={"num_heads": 4, "num_kv_heads": 4})


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_case_33_sixteen_bits_are_close_to_fp32(
    run_plan: RunPlan, dtype: str, is_sharded: bool
) -> None:
    plan, source = plan_of(dtype, sharded_optimizer=is_sharded), RandomTokens(NUM_SAMPLES)
    results = run_plan(plan, four_heads(), OPTIONS, source)
    reference = reference_of(plan, four_heads(), OPTIONS, source)
    for result in results:
        losses = [m.loss for m in result.metrics]
        norms = [m.grad_norm for m in result.metrics]
        assert losses == pytest.approx(reference.losses, rel=TOLERANCE[dtype])
        assert norms == pytest.approx(reference.grad_norms, rel=5 * TOLERANCE[dtype])
        assert not any(m.skipped for m in result.metrics)
    weights = merged(results, "weights", are_equal=is_sharded)
    # Adam moves elements whose gradient is all rounding by as much as others, so all are looked at
    # together: how far they are from where they should be, as a part of how far they have come.
    off = moved = 0.0
    for name, weight in reference.weights.items():
        first = initial_value(four_heads(), seed=OPTIONS.seed, name=name, shape=weight.shape)
        off += float((weights[name] - weight).square().sum())
        moved += float((weight - first).square().sum())
    assert (off / moved) ** 0.5 < WEIGHTS_TOLERANCE[dtype], (off / moved) ** 0.5


def test_gradients_may_be_summed_in_bf16(run_plan: RunPlan) -> None:
    plan, source = plan_of("fp32"), RandomTokens(NUM_SAMPLES)
    options = OPTIONS.model_copy(update={"reduce_dtype": "bf16"})
    results = run_plan(plan, four_heads(), options, source)
    reference = reference_of(plan, four_heads(), options, source)
    norms = [m.grad_norm for m in results[0].metrics]
    assert norms == pytest.approx(reference.grad_norms, rel=TOLERANCE["bf16"])
    assert norms != pytest.approx(reference.grad_norms, rel=1e-6)  # it was less exact


def overflowing(
    rank: int, plan: Plan, spec: ModelSpec, options: RunOptions, root: str, first_scale: float
) -> Any:
    """Train in fp16 from a scale that is too large, and tell what became of it."""
    trainer = Trainer(
        plan,
        spec,
        rank=rank,
        options=options,
        folder=RunFolder(root),
        source=RandomTokens(30),
    )
    if not options.resume:
        trainer.loss_scale.value = first_scale
    start = trainer.loss_scale.value
    seen = []
    while trainer.step < options.steps:
        is_finite = trainer.train_step().is_finite
        seen.append((is_finite, trainer.loss_scale.value, trainer.loss_scale.num_finite))
    trainer.save()
    dtypes = {tensor.dtype for tensor in trainer.optimizer.loaded_state().values()}
    return start, seen, dtypes, {p.parameter.dtype for p in trainer.parameters}


def test_overflow_is_skipped_by_all_ranks_and_lowers_the_scale(
    pool: RankPool, tmp_path: Path
) -> None:
    plan, spec = plan_of("fp16"), four_heads()
    arguments = (plan, spec, RunOptions(steps=12), str(tmp_path), 2.0**22)
    results = pool.run(overflowing, *arguments, num_ranks=6)
    assert all(result == results[0] for result in results)
    _, seen, masters, parameters = results[0]
    assert masters == {torch.float32}
    assert parameters == {torch.float16}
    skipped = [not is_finite for is_finite, _, _ in seen]
    assert skipped[0]
    assert not skipped[-1]
    for i, (is_finite, scale, num_finite) in enumerate(seen):
        assert scale == 2.0**22 / 2 ** sum(skipped[: i + 1])
        assert num_finite == (0 if not is_finite else (seen[i - 1][2] + 1 if i else 1))
    info = checkpoints.read_info(RunFolder(tmp_path), 12)
    assert (info.loss_scale, info.num_finite_steps) == seen[-1][1:]
    more = (plan, spec, RunOptions(steps=13, resume=True), str(tmp_path), 0.0)
    for start, _, _, _ in pool.run(overflowing, *more, num_ranks=6):
        assert start == seen[-1][1]


def test_the_scale_doubles_after_enough_finite_steps() -> None:
    scale = LossScale(is_used=True, growth_steps=3)
    values = []
    for is_finite in (True, True, True, False, True, True, True):
        scale.update(is_finite=is_finite)
        values.append(scale.value / FIRST_SCALE)
    assert values == [1, 1, 2, 1, 1, 1, 2]
    unused = LossScale(is_used=False)
    unused.update(is_finite=False)
    assert unused.value == 1


def mixed_cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: mixed\n"
        "nodes: [{name: a, devices: [{type: A100-40, count: 3}, {type: V100-16, count: 2}]}]\n"
        "network: {inter_node: {bandwidth: 1Gbps}}\n",
        encoding="utf-8",
    )
    return read_cluster(path)


def test_devices_without_bf16_compute_in_fp16(run_plan: RunPlan, tmp_path: Path) -> None:
    pipelines = [make_pipeline([1, 3], share=(3, 1)), make_pipeline([2], share=(2, 2))]
    plan = make_plan(pipelines, dtype="bf16").model_copy(
        update={"cluster": mixed_cluster(tmp_path)}
    )
    assert [precision.rank_dtype(plan, r) for r in range(5)] == ["bf16"] * 3 + ["fp16"] * 2
    (note,) = precision.notes(plan)
    assert note.startswith("V100-16 in fp16, which has no bf16; all other devices compute in bf16")
    source = RandomTokens(NUM_SAMPLES)
    results = run_plan(plan, make_spec(), OPTIONS, source)
    reference = reference_of(plan, make_spec(), OPTIONS, source)
    losses = [m.loss for m in results[0].metrics]
    assert losses == pytest.approx(reference.losses, rel=TOLERANCE["bf16"])
    assert not list(precision.notes(make_plan(pipelines, dtype="bf16")))
