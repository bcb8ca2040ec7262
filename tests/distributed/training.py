"""Tiny models, random plans, and one run of a plan, for the tests of the runtime."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eth_cli import serde
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.dataset import IGNORED_LABEL, Tokens
from eth_cli.launch.runtime.metrics import StepMetrics
from eth_cli.launch.runtime.shards import parse_key
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.schedule import Action

SEQ_LEN = 8
VOCAB_SIZE = 23


def make_spec(*, family: str = "gpt", tied: bool = True, num_layers: int = 3) -> ModelSpec:
    """A model of a few thousand parameters."""
    data: dict[str, Any] = {
        "name": "tiny",
        "family": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 12,
        "num_layers": num_layers,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 4,
        "ffn_size": 20,
        "max_positions": SEQ_LEN + 2,
        "activation": "gelu",
        "tied": tied,
        "embedding_size": 12,
    }
    if family == "llama":
        data |= {"num_kv_heads": 1, "activation": "silu"}
    return ModelSpec.model_validate(data)


def make_pipeline(
    cuts: Sequence[int], *, share: tuple[int, int], num_blocks: int = 5, recompute: bool = False
) -> dict[str, Any]:
    """A pipeline cut before the blocks ``cuts``; share is (micro_batches, micro_batch_size)."""
    edges = [0, *cuts, num_blocks]
    return {
        "micro_batches": share[0],
        "micro_batch_size": share[1],
        "stages": [
            {"blocks": [start, stop], "devices": [], "recompute": recompute}
            for start, stop in itertools.pairwise(edges)
        ],
    }


def make_plan(
    pipelines: Sequence[dict[str, Any]], *, shuffle: random.Random | None = None, **fields: Any
) -> Plan:
    """A plan of these pipelines; with ``shuffle`` ranks do not follow pipelines and stages.

    A stage has as many devices as its ``width`` says: one, where it has none.
    """
    stages = [stage for pipeline in pipelines for stage in pipeline["stages"]]
    widths = [stage.pop("width", 1) for stage in stages]
    indices = list(range(sum(widths)))
    if shuffle is not None:
        shuffle.shuffle(indices)
    for stage, width in zip(stages, widths, strict=True):
        stage["devices"] = [f"a:{indices.pop(0)}" for _ in range(width)]
    data = {
        "schema_version": 1,
        "model": "tiny",
        "seq_len": SEQ_LEN,
        "dtype": "fp32",
        "global_batch_size": sum(p["micro_batches"] * p["micro_batch_size"] for p in pipelines),
        "pipelines": list(pipelines),
        **fields,
    }
    return serde.validate(Plan, data, "plan of a test")


def random_plan(seed: int, *, max_ranks: int = 6) -> tuple[Plan, ModelSpec]:
    """A plan over 1 to 6 ranks: up to 3 pipelines of up to 4 stages, everything uneven."""
    rng = random.Random(seed)
    num_layers = rng.randint(2, 4)
    num_blocks = num_layers + 2
    spec = make_spec(
        family=rng.choice(["gpt", "llama"]), tied=rng.random() < 0.5, num_layers=num_layers
    )
    num_pipelines = rng.randint(1, 3)
    left = rng.randint(num_pipelines, max_ranks)
    pipelines = []
    for i in range(num_pipelines):
        others = num_pipelines - i - 1
        most = min(4, left - others, num_blocks)
        num_stages = most if others == 0 else rng.randint(1, most)
        left -= num_stages
        cuts = sorted(rng.sample(range(1, num_blocks), num_stages - 1))
        pipelines.append(
            make_pipeline(
                cuts,
                share=(rng.randint(1, 5), rng.randint(1, 3)),
                num_blocks=num_blocks,
                recompute=rng.random() < 0.2,
            )
        )
    return make_plan(pipelines, shuffle=rng), spec


class RandomTokens:
    """Random samples whose number of ignored labels differs widely; some have no valid label."""

    def __init__(self, num_samples: int, *, seed: int = 0, empty: Sequence[int] = ()) -> None:
        self.digest = f"{num_samples} random samples of seed {seed}"
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(0, VOCAB_SIZE, size=(num_samples, SEQ_LEN))
        self._labels = rng.integers(0, VOCAB_SIZE, size=(num_samples, SEQ_LEN))
        for row in range(num_samples):
            self._labels[row, : rng.integers(0, SEQ_LEN + 1)] = IGNORED_LABEL
        self._labels[list(empty)] = IGNORED_LABEL

    @property
    def num_samples(self) -> int:
        return len(self._tokens)

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        return self._tokens[index], self._labels[index]

    def num_valid(self, index: int) -> int:
        return int((self._labels[index] != IGNORED_LABEL).sum())


@dataclass
class RankResult:
    """What one rank has to show after a run."""

    metrics: list[StepMetrics] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole parameters by name; NaN where the rank does not hold them. So in all that follow."""
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    """``exp_avg.<name>`` and ``exp_avg_sq.<name>``."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last step, summed over all ranks and clipped."""
    executed: list[Action] = field(default_factory=list)
    stopped: bool = False


def train(
    rank: int,
    plan: Plan,
    spec: ModelSpec,
    options: RunOptions,
    root: str,
    source: Any,
    stop_after: int | None = None,
) -> RankResult:
    """A job for `ranks.RankPool`: run a plan, from start to end or to a stop after a step."""
    result = RankResult()

    def on_step(metrics: StepMetrics) -> None:
        result.metrics.append(metrics)
        result.executed = list(trainer.pipeline.executed)
        if stop_after is not None and metrics.step == stop_after - 1 and rank == 0:
            trainer.request_stop()

    trainer = Trainer(
        plan,
        spec,
        rank=rank,
        options=options,
        folder=RunFolder(root),
        source=source,
        on_step=on_step,
    )
    result.stopped = trainer.train()
    for owned in trainer.parameters:
        for what, tensor in (("weights", owned.parameter), ("gradients", owned.parameter.grad)):
            assert tensor is not None
            whole = getattr(result, what)[owned.name] = torch.full(owned.layout.shape, math.nan)
            for box in owned.layout.boxes():
                placed(whole, owned.layout.offsets(box), box.of(tensor.detach()))
    for key, tensor in trainer.optimizer.loaded_state().items():
        box_key = parse_key(key)
        if box_key.name.startswith("exp_avg"):
            empty = torch.full(box_key.shape, math.nan)
            placed(result.moments.setdefault(box_key.name, empty), box_key.offsets, tensor)
    assert dist.get_world_size() == len(plan.ranks)
    return result


def placed(whole: torch.Tensor, offsets: Sequence[int], part: torch.Tensor) -> None:
    """Copy a part to where it belongs in a whole tensor."""
    where = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
    whole[where].copy_(part)


def merged(
    results: Sequence[RankResult], what: str, *, are_equal: bool = True
) -> dict[str, torch.Tensor]:
    """A field of all ranks' results together.

    Copies of one element must be equal bit by bit; to rounding, where ``are_equal`` is false.
    """
    whole: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in getattr(result, what).items():
            known = whole.setdefault(name, tensor.clone())
            both = ~known.isnan() & ~tensor.isnan()
            rtol, atol = (0.0, 0.0) if are_equal else (1e-6, 1e-8)
            torch.testing.assert_close(
                known[both], tensor[both], rtol=rtol, atol=atol, msg=f"copies of {name} differ"
            )
            known.copy_(torch.where(known.isnan(), tensor, known))
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def widths_of(plan: Plan) -> set[int]:
    """Widths of all stages."""
    return {stage.tensor_parallel for p in plan.pipelines for stage in p.stages}
