"""Peak memory of one device of a stage. One formula, one function, every term named.

What it leaves out: fragmentation of the allocator; a profile's ``process_bytes`` (per device type)
is where a measured constant for it belongs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eth_cli.profile.table import Profile
from eth_cli.search.blocks import BlockTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Terms of a device's peak memory; all but the activations hold for the whole step [bytes]."""

    parameters_bytes: int
    """Weights, gradients, master weights and optimizer state: parameters of the stage / t
    x bytes_per_parameter, the sharded part of it only in proportion."""
    activations_bytes: int
    """Saved for backward: activations of one micro-batch x micro-batches in flight."""
    recompute_bytes: int
    """Under recomputation: the full activations of the one block that is being recomputed."""
    boundary_bytes: int
    """Buffers towards each neighbouring stage: one to send and one to receive."""
    process_bytes: int
    """The process itself, before it holds any block; communication buffers included."""
    workspace_bytes: int = 0
    """What the neediest block holds only while it runs. Blocks of a stage run one at a time, so
    the largest counts, once."""

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return (
            self.parameters_bytes
            + self.activations_bytes
            + self.recompute_bytes
            + self.boundary_bytes
            + self.process_bytes
            + self.workspace_bytes
        )


def stage_memory(
    profile: Profile,
    table: BlockTable,
    *,
    start: int,
    stop: int,
    num_in_flight: int,
    recompute: bool = False,
    optimizer_fraction: float = 1.0,
) -> StageMemory:
    """Peak memory of a device that holds blocks ``[start, stop)`` (1/t of each at width t).

    Args:
        num_in_flight: micro-batches whose activations it holds at the peak: ``min(m, P - s)``
            under 1F1B (`eth_cli.schedule.num_in_flight`).
        optimizer_fraction: the part of the optimizer state that the device keeps: 1, or
            1 / owners with a sharded optimizer.
    """
    model = profile.model
    bytes_per_parameter = profile.memory.bytes_per_parameter
    if optimizer_fraction < 1.0:
        sharded = profile.memory.optimizer_bytes_per_parameter or 0.0
        bytes_per_parameter -= sharded * (1.0 - optimizer_fraction)
    num_parameters = -(-model.stage_parameters(start, stop) // table.tensor_parallel)
    num_neighbours = (start > 0) + (stop < model.num_blocks)
    if recompute:
        per_micro_batch = table.recompute_bytes(start, stop)
        recomputed = table.largest_activation_bytes(start, stop)
    else:
        per_micro_batch, recomputed = table.activation_bytes(start, stop), 0
    return StageMemory(
        parameters_bytes=math.ceil(num_parameters * bytes_per_parameter),
        activations_bytes=per_micro_batch * num_in_flight,
        recompute_bytes=recomputed,
        boundary_bytes=2
        * num_neighbours
        * model.boundary_bytes_per_sample
        * table.micro_batch_size,
        process_bytes=profile.process_bytes(table.device_type),
        workspace_bytes=table.largest_workspace_bytes(start, stop),
    )


def max_in_flight(
    profile: Profile,
    table: BlockTable,
    *,
    start: int,
    stop: int,
    capacity_bytes: int,
    recompute: bool = False,
    limit: int,
) -> int:
    """Most micro-batches in flight that a device has memory for, at most ``limit``; 0: none.

    Memory grows linearly with the micro-batches in flight, so two values of `stage_memory` tell.
    """
    one = stage_memory(profile, table, start=start, stop=stop, num_in_flight=1, recompute=recompute)
    spare = capacity_bytes - (one.total_bytes - one.activations_bytes)
    if spare < one.activations_bytes:
        return 0
    if one.activations_bytes == 0:
        return limit
    return min(limit, spare // one.activations_bytes)
