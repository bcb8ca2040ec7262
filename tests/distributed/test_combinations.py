"""Any plan trains the same model, with stages of several devices and everything else at once."""

from __future__ import annotations

import random

import pytest
from distributed.combinations import combination, wide_spec
from distributed.conftest import RunPlan
from distributed.test_parity import check_plan, share_without_labels

pytestmark = pytest.mark.distributed

SEEDS = range(66)
FEW = (0, 4, 9, 13, 18, 23)
"""In the default run; the others are behind the marker `slow`."""


@pytest.mark.parametrize(
    "seed", [s if s in FEW else pytest.param(s, marks=pytest.mark.slow) for s in SEEDS]
)
def test_combination_equals_one_process(run_plan: RunPlan, seed: int) -> None:
    plan, spec, options = combination(seed)
    source = share_without_labels(plan) if seed % 2 else None
    check_plan(run_plan, plan, spec, source=source, **options)


def test_combinations_cover_what_matters() -> None:
    for seeds in (SEEDS, FEW):
        found = [combination(seed) for seed in seeds]
        stages = [s for plan, _, _ in found for p in plan.pipelines for s in p.stages]
        assert {stage.tensor_parallel for stage in stages} == {1, 2, 4}
        assert {plan.sharded_optimizer for plan, _, _ in found} == {True, False}
        assert {stage.recompute for stage in stages} == {True, False}
        assert any(options["loss_chunk"] for _, _, options in found)
        assert any(
            len({s.tensor_parallel for p in plan.pipelines for s in p.stages}) > 1
            and len(plan.pipelines) > 1
            for plan, _, _ in found
        )
    modes = {combination(seed)[2]["grad_sync"] for seed in SEEDS}
    assert modes == {"block", "layer", "whole"}


def test_wide_models_are_possible() -> None:
    specs = [wide_spec(random.Random(seed)) for seed in range(40)]
    assert {spec.family for spec in specs} == {"gpt", "llama"}
    assert all(spec.num_heads % 4 == spec.num_kv_heads % 4 == 0 for spec in specs)
    assert any(spec.qk_norm for spec in specs)
    assert any(spec.num_heads != spec.num_kv_heads for spec in specs)
    assert all(spec.vocab_size % 2 and spec.ffn_size % 2 for spec in specs)
