"""Random plans of everything at once: widths, owners that split updates, recomputation, chunks."""

from __future__ import annotations

import random
from typing import Any

from distributed.training import SEQ_LEN, make_pipeline, make_plan, make_spec

from eth_cli.model import ModelSpec
from eth_cli.plan import Plan

MOST_RANKS = 6
WIDTHS = (1, 2, 4)


def wide_spec(rng: random.Random) -> ModelSpec:
    """A model that four devices can share; of its vocabulary and layers they get uneven parts."""
    family = rng.choice(["gpt", "llama"])
    spec = make_spec(family=family, tied=rng.random() < 0.5, num_layers=rng.randint(2, 3))
    update: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "ffn_size": 21}
    if family == "llama":
        grouped = rng.random() < 0.5
        update |= {
            "num_heads": 8 if grouped else 4,
            "head_dim": 2 if grouped else 4,
            "qk_norm": rng.random() < 0.5,
            "qkv_bias": rng.random() < 0.5,
        }
    else:
        update |= {"embedding_size": rng.choice([12, 8])}
    return ModelSpec.model_validate(spec.model_dump() | update)


def combination(seed: int) -> tuple[Plan, ModelSpec, dict[str, Any]]:
    """A plan over at most six ranks, its model, and options of the run."""
    rng = random.Random(seed)
    spec = wide_spec(rng)
    num_blocks = spec.num_blocks
    left = MOST_RANKS
    pipelines = []
    for i in range(rng.choice([1, 2, 2, 2, 3])):
        if not left:
            break
        widths = [rng.choice([w for w in WIDTHS if w <= left])]
        while sum(widths) < left and len(widths) < 3 and rng.random() < 0.4:
            widths.append(rng.choice([w for w in WIDTHS if w <= left - sum(widths)]))
        left -= sum(widths)
        cuts = sorted(rng.sample(range(1, num_blocks), len(widths) - 1))
        share = (rng.randint(1, 3), rng.randint(1, 2))
        pipelines.append(
            make_pipeline(cuts, share=share, num_blocks=num_blocks, recompute=rng.random() < 0.3)
        )
        for stage, width in zip(pipelines[i]["stages"], widths, strict=True):
            stage["width"] = width
    plan = make_plan(pipelines, shuffle=rng, sharded_optimizer=rng.random() < 0.5)
    options = {
        "loss_chunk": rng.choice([0, 0, 3, SEQ_LEN]),
        "bucket_bytes": rng.choice([1, 6000, 2**26]),
        "grad_sync": rng.choice(["block", "block", "layer", "whole"]),
        "clip": rng.choice([0.5, None]),
    }
    return plan, spec, options
