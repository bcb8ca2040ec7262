"""What tests of real runs share: a small paced plan, and finding processes independently."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from builders import make_cluster, make_pipeline, make_plan

from eth_cli.model_sources import load_model
from eth_cli.plan import PacedBlock, PacedOptimizer, Pacing, Plan

SEQ_LEN = 32
BLOCK_S = 0.01
"""Forward of one block; its backward takes twice as long."""


def paced_plan(*, num_ranks: int = 3) -> Plan:
    """Two pipelines on two or three emulated devices of two nodes; a step takes about a second."""
    spec = load_model("gpt-tiny")
    blocks = spec.num_blocks
    pipelines = [make_pipeline(devices=("b:0",), num_blocks=blocks, micro_batches=2)]
    if num_ranks == 3:
        # Device order and stage order differ on purpose.
        long = make_pipeline(devices=("a:1", "a:0"), cuts=(6,), num_blocks=blocks, micro_batches=3)
        pipelines.append(long)
    else:
        pipelines.append(make_pipeline(devices=("a:0",), num_blocks=blocks, micro_batches=3))
    plan = make_plan(pipelines=pipelines)
    pacing = Pacing(
        blocks=tuple(
            PacedBlock(
                device=device,
                block=kind,
                tensor_parallel=1,
                micro_batch_size=1,
                forward_s=BLOCK_S,
                backward_s=2 * BLOCK_S,
            )
            for device in ("fast", "slow")
            for kind in ("embedding", "transformer", "head")
        ),
        optimizers=tuple(
            PacedOptimizer(device=device, optimizer_s_per_parameter=0.0)
            for device in ("fast", "slow")
        ),
    )
    cluster = make_cluster(emulated=True)
    data = plan.model_dump() | {
        "cluster": cluster,
        "model_spec": spec,
        "pacing": pacing,
        "seq_len": SEQ_LEN,
    }
    return Plan.model_validate(data)


def processes_of(folder: Path) -> dict[int, int | None]:
    """Live processes that have a run folder among their arguments, each with its rank if any."""
    found: dict[int, int | None] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) == os.getpid():
                continue
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if not any(str(folder).encode() in argument for argument in arguments):
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
            ranks = [int(e[5:]) for e in environment if e.startswith(b"RANK=")]
            found[int(entry.name)] = ranks[0] if ranks else None
    return found


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Wait for a condition; fail with what it is when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
