"""One rank of a measurement: ``python -m eth_cli.profile.worker FOLDER`` under torchrun.

Reads the request, times what it asks for, writes what this rank found. `profile.measure` starts it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from eth_cli import serde
from eth_cli.profile.analytic import distinct_blocks
from eth_cli.profile.compute import measure_block, measure_optimizer, process_bytes
from eth_cli.profile.measurement import BlockMeasurement, Folder, RankMeasurement, Request
from eth_cli.profile.network import measure_link

COLLECTIVE_TIMEOUT_S = 240.0
"""A rank waits so long for the others, which may be timing a large block [s]."""


def main(root: str) -> None:
    """Measure and write this rank's result."""
    folder = Folder(root)
    request = serde.read_json(folder.request, Request)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        result = _measure(request, folder, rank, world_size, device)
        serde.write_json(folder.result_of(rank), result)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(
    request: Request, folder: Folder, rank: int, world_size: int, device: torch.device
) -> RankMeasurement:
    def done(what: str) -> None:
        if rank == 0:
            with open(folder.progress, "a", encoding="utf-8") as file:
                file.write(what + "\n")

    # The first collective makes the communicator and its buffers, which every process has.
    dist.barrier()
    own_bytes = process_bytes(device)
    blocks: list[BlockMeasurement] = []
    optimizer_s = None
    computes = rank < request.num_compute_ranks
    if request.num_compute_ranks:
        for kind, index in distinct_blocks(request.spec).items():
            for size in request.micro_batch_sizes:
                # All at the same moment: in training they share caches, memory and power, too.
                dist.barrier()
                if computes:
                    blocks.append(
                        measure_block(
                            request.spec,
                            index,
                            dtype=request.dtype,
                            micro_batch_size=size,
                            seq_len=request.seq_len,
                            device=device,
                        )
                    )
                done(f"{kind}, micro-batch size {size}")
        dist.barrier()
        if computes:
            optimizer_s = measure_optimizer(request.spec, device=device)
        done("optimizer")
    dist.barrier()
    table = None
    if world_size > 1 and rank < 2:
        table = measure_link(
            peer=1 - rank,
            leads=rank == 0,
            device=device,
            on_done=lambda size: done(f"messages of {size} bytes"),
        )
    return RankMeasurement(
        blocks=tuple(blocks),
        optimizer_s_per_parameter=optimizer_s,
        process_bytes=own_bytes + max((block.working_bytes for block in blocks), default=0),
        link_table=table,
    )


if __name__ == "__main__":
    main(sys.argv[1])
