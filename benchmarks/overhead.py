"""What this runtime costs over bare torch: pipelines against `torch.distributed.pipelining`, and
pipelines of one stage against `DistributedDataParallel`.

    python -m benchmarks.overhead [--steps 20] [--json results.json]

Real CPU work, no pacing, one thread a process. Both programs live in the same processes, with the
same blocks, data and optimizer, and take turns step by step; medians and their ratio are of this
one run. The bare ones do what a short script would: schedule or model, sum of losses, clipping of
the global norm, AdamW. Ours is a whole step of `eth run`: reading of the batch, agreement of all
ranks on norm, loss and stops, clipping, AdamW, events and metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by
from torch.nn.parallel import DistributedDataParallel

from eth_cli import serde
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.dataset import Tokens
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.model import ModelSpec
from eth_cli.models import build
from eth_cli.plan import Plan

SEQ_LEN = 128
NUM_LAYERS = 6
MICRO_BATCHES = 8
WARM_UP_STEPS = 3
VOCAB_SIZE = 512
CLIP = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting."""

    setting: str
    bare_s: float
    ours_s: float

    @property
    def ratio(self) -> float:
        """Ours over the bare one."""
        return self.ours_s / self.bare_s


def model() -> ModelSpec:
    """A GPT of 5 million parameters."""
    data: dict[str, Any] = {
        "name": "gpt-small",
        "family": "gpt",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_layers": NUM_LAYERS,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn_size": 1024,
        "max_positions": SEQ_LEN,
        "activation": "gelu",
        "tied": False,
        "embedding_size": 256,
    }
    return ModelSpec.model_validate(data)


def plan(num_pipelines: int, num_stages: int, micro_batches: int) -> Plan:
    """Equal pipelines, equally cut."""
    num_blocks = NUM_LAYERS + 2
    cuts = [round(i * num_blocks / num_stages) for i in range(num_stages + 1)]
    pipelines = [
        {
            "micro_batches": micro_batches,
            "micro_batch_size": 1,
            "stages": [
                {
                    "blocks": [cuts[s], cuts[s + 1]],
                    "devices": [f"a:{i * num_stages + s}"],
                    "recompute": False,
                }
                for s in range(num_stages)
            ],
        }
        for i in range(num_pipelines)
    ]
    data = {
        "schema_version": 1,
        "model": "gpt-small",
        "seq_len": SEQ_LEN,
        "dtype": "fp32",
        "global_batch_size": num_pipelines * micro_batches,
        "pipelines": pipelines,
    }
    return serde.validate(Plan, data, "plan")


class RandomTokens:
    """Random samples, the same on every rank."""

    digest = "random"
    num_samples = 64

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(0, VOCAB_SIZE, size=(self.num_samples, SEQ_LEN + 1))

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Tokens and labels."""
        return self._tokens[index, :-1], self._tokens[index, 1:]

    def num_valid(self, index: int) -> int:
        """All labels count."""
        return SEQ_LEN


def blocks(spec: ModelSpec, start: int, stop: int) -> nn.Sequential:
    """Blocks as `eth run` builds them."""
    made = []
    for index in range(start, stop):
        block = build.build_block(spec, index, dtype=torch.float32, device=torch.device("cpu"))
        build.initialise_block(block, spec, index, seed=0)
        made.append(block)
    return nn.Sequential(*made)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def bare_pipeline(made: Plan, spec: ModelSpec, rank: int) -> Callable[[], None]:
    """A step of a script on `torch.distributed.pipelining`."""
    (pipeline,) = made.pipelines
    num_stages = len(pipeline.stages)
    module = blocks(spec, *pipeline.stages[rank].blocks)
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"))
    num_tokens = made.global_batch_size * SEQ_LEN

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(logits, labels) / num_tokens

    schedule = Schedule1F1B(stage, pipeline.micro_batches, loss_fn=loss_of, scale_grads=False)
    parameters = list(module.parameters())
    adamw = torch.optim.AdamW(parameters, fused=True)
    tokens, labels = batch(range(made.global_batch_size))

    def step() -> None:
        if rank == 0:
            schedule.step(tokens)
        elif rank == num_stages - 1:
            losses: list[torch.Tensor] = []
            schedule.step(target=labels, losses=losses)
            float(torch.stack(losses).detach().sum())
        else:
            schedule.step()
        norm_squared = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(norm_squared)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm_squared.sqrt())
        adamw.step()
        adamw.zero_grad()

    return step


def bare_data_parallel(made: Plan, spec: ModelSpec, rank: int) -> Callable[[], None]:
    """A step of a script on `DistributedDataParallel`, with accumulation where it is wanted."""
    module = DistributedDataParallel(blocks(spec, 0, spec.num_blocks))
    adamw = torch.optim.AdamW(module.parameters(), fused=True)
    share = made.pipelines[rank].micro_batches
    tokens, labels = batch(range(rank * share, (rank + 1) * share))

    def step() -> None:
        total = torch.zeros(())
        for i in range(share):
            with module.no_sync() if i + 1 < share else torch.enable_grad():
                loss = summed_loss(module(tokens[i : i + 1]), labels[i : i + 1])
                (loss / (share * SEQ_LEN)).backward()
                total += loss.detach()
        float(total)
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()

    return step


def batch(samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of samples."""
    pairs = [RandomTokens().sample(i) for i in samples]
    tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
    return tokens, labels


def work(rank: int, made: Plan, steps: int, root: str) -> None:
    """One process: both programs, in turns. Rank 0 leaves the times in ``root``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/meet", rank=rank, world_size=len(made.ranks)
    )
    spec = model()
    is_pipeline = len(made.pipelines) == 1
    bare = (bare_pipeline if is_pipeline else bare_data_parallel)(made, spec, rank)
    trainer = Trainer(
        made,
        spec,
        rank=rank,
        options=RunOptions(steps=10**6),
        folder=RunFolder(root),
        source=RandomTokens(),
    )
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for i in range(steps + WARM_UP_STEPS):
        order = [("bare", bare), ("ours", trainer.train_step)]
        for name, step in order if i % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if i >= WARM_UP_STEPS:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(root, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure(setting: str, made: Plan, *, steps: int) -> Row:
    """The medians of one setting."""
    with tempfile.TemporaryDirectory() as root:
        mp.spawn(work, (made, steps, root), nprocs=len(made.ranks))  # type: ignore[attr-defined,no-untyped-call] # torch's has no types
        times = json.loads(Path(root, "times.json").read_text())
    bare_s, ours_s = (statistics.median(times[name]) for name in ("bare", "ours"))
    return Row(setting=setting, bare_s=bare_s, ours_s=ours_s)


SETTINGS = {
    "2 stages": (1, 2, MICRO_BATCHES),
    "4 stages": (1, 4, MICRO_BATCHES),
    "data parallel, 2 ranks": (2, 1, 1),
    "data parallel, 2 ranks, 4 micro-batches": (2, 1, 4),
}


def table(rows: Sequence[Row]) -> str:
    """A line for each setting."""
    lines = ["| setting | bare | eth | eth / bare |", "|---|---|---|---|"]
    lines += [
        f"| {row.setting} | {row.bare_s * 1e3:.1f} ms | {row.ours_s * 1e3:.1f} ms "
        f"| {row.ratio:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps that count (20)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(name, plan(*s), steps=arguments.steps) for name, s in SETTINGS.items()]
    print(table(rows))
    if arguments.json:
        data = [asdict(row) | {"ratio": row.ratio} for row in rows]
        arguments.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
