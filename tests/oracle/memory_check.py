"""Peak memory of every device of a plan, by the formula of docs/search.md, apart from the product.

Parameters of the stage / t x bytes per parameter, a weight tied within the stage once; activations
of one micro-batch x min(m, P - s) in flight; two buffers towards each neighbour; the process; the
largest workspace of a block. With recomputation: what is kept of every block in flight, and the
largest block's activations once.
"""

from __future__ import annotations

import math

from eth_cli.cluster import Cluster
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile


def peak_bytes(plan: Plan, profile: Profile, cluster: Cluster) -> dict[str, int]:
    """By device id [bytes]."""
    rate = profile.memory.bytes_per_parameter
    if plan.sharded_optimizer:
        part = 1 - 1 / len(plan.pipelines)
        rate -= (profile.memory.optimizer_bytes_per_parameter or 0.0) * part
    peaks = {}
    for pipeline in plan.pipelines:
        num_stages, size = len(pipeline.stages), pipeline.micro_batch_size
        for s, stage in enumerate(pipeline.stages):
            width = len(stage.devices)
            device_type = cluster.devices[stage.devices[0]].type
            blocks = range(*stage.blocks)
            parameters = sum(profile.model.parameters[b] for b in blocks)
            for group in profile.model.tied_blocks:
                uses = len(set(group) & set(blocks))
                parameters -= max(0, uses - 1) * profile.model.tied_parameters
            saved, kept, workspaces = [], [], []
            for b in blocks:
                entry = profile.lookup(
                    device_type,
                    profile.model.kinds[b],
                    tensor_parallel=width,
                    micro_batch_size=size,
                )
                assert entry is not None, f"{device_type} has no width {width}, size {size}"
                saved.append(entry.activation_bytes)
                kept.append(entry.recompute_activation_bytes)
                workspaces.append(entry.workspace_bytes or 0)
            in_flight = min(pipeline.micro_batches, num_stages - s)
            if stage.recompute:
                activations = max(saved)
                for held in kept:
                    assert held is not None, "recomputed without a figure of what is kept"
                    activations += held * in_flight
            else:
                activations = sum(saved) * in_flight
            neighbours = (s > 0) + (s < num_stages - 1)
            needed = (
                math.ceil(math.ceil(parameters / width) * rate)
                + activations
                + 2 * neighbours * size * profile.model.boundary_bytes_per_sample
                + profile.process_bytes(device_type)
                + max(workspaces)
            )
            peaks.update(dict.fromkeys(stage.devices, needed))
    return peaks


def check_fits(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Every device has memory for its stage; groups lie in one node and are of one type."""
    for device, needed in peak_bytes(plan, profile, cluster).items():
        capacity = cluster.type_of(device).memory_bytes
        assert needed <= capacity, f"{device} needs {needed} bytes and has {capacity}"
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            places = {cluster.devices[d][::2] for d in stage.devices}
            assert len(places) == 1, f"a group is spread over {places}"
