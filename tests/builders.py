"""Small clusters, profiles and plans for tests, with readable numbers that all differ.

Every function takes keywords only and gives a legal object; a test changes what it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node
from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
)

SPEEDS = {"fast": 1.0, "slow": 3.0, "mid": 1.9}
"""Device types of the builders: how many times longer than on `fast` a block takes."""

MEMORY_BYTES = {"fast": 1_000_000_000, "slow": 700_000_000, "mid": 850_000_000}


def make_cluster(
    *, nodes: Mapping[str, Mapping[str, int]] | None = None, emulated: bool = False
) -> Cluster:
    """A cluster; ``nodes`` maps a node's name to its number of devices by type."""
    nodes = nodes or {"a": {"fast": 2}, "b": {"slow": 2}}
    types = sorted({name for groups in nodes.values() for name in groups})
    return Cluster(
        name="small",
        device_types={
            name: DeviceType(
                memory_bytes=MEMORY_BYTES[name],
                peak_flops={"fp32": 6.1e12 / SPEEDS[name]},
                memory_bandwidth_bytes_per_s=4.1e11,
                compute_capability=8.0,
                emulated=emulated,
            )
            for name in types
        },
        nodes=tuple(
            Node(
                name=node,
                devices=tuple(DeviceGroup(type=t, count=n) for t, n in groups.items()),
            )
            for node, groups in nodes.items()
        ),
        network=Network(
            intra_node=Link(latency_s=5e-6, bandwidth_bytes_per_s=1.1e10),
            inter_node=Link(latency_s=3e-5, bandwidth_bytes_per_s=1.3e9),
        ),
    )


def make_profile(
    *,
    types: Sequence[str] = ("fast", "slow"),
    num_layers: int = 6,
    micro_batch_sizes: Sequence[int] = (1, 2),
    dtype: Literal["bf16", "fp16", "fp32"] = "fp32",
) -> Profile:
    """A profile of an embedding, ``num_layers`` equal layers and a head."""
    costs = {  # forward [s], backward [s], activations [bytes] of one sample on `fast`
        "embedding": (0.0004, 0.0007, 1_100_000),
        "transformer": (0.0031, 0.0062, 9_300_000),
        "head": (0.0023, 0.0047, 5_300_000),
    }
    return Profile(
        schema_version=1,
        seq_len=128,
        dtype=dtype,
        model=ProfiledModel(
            name="toy",
            blocks=(
                BlockGroup(kind="embedding", parameters=2_000_003),
                BlockGroup(kind="transformer", count=num_layers, parameters=3_000_017),
                BlockGroup(kind="head", parameters=2_500_009),
            ),
            boundary_bytes_per_sample=131_072,
        ),
        memory=MemoryModel(bytes_per_parameter=16, process_bytes=50_000_000),
        compute=tuple(
            ComputeEntry(
                device=device,
                block=block,
                micro_batch_size=size,
                forward_s=forward_s * SPEEDS[device] * size,
                backward_s=backward_s * SPEEDS[device] * size,
                activation_bytes=num_bytes * size,
                recompute_activation_bytes=131_072 * size,
            )
            for device in types
            for block, (forward_s, backward_s, num_bytes) in costs.items()
            for size in micro_batch_sizes
        ),
        devices=tuple(
            DeviceEntry(type=device, optimizer_s_per_parameter=2.1e-11 * SPEEDS[device])
            for device in types
        ),
    )


def make_pipeline(
    *,
    devices: Sequence[str],
    cuts: Sequence[int] = (),
    num_blocks: int = 8,
    micro_batches: int = 4,
    micro_batch_size: int = 1,
) -> Pipeline:
    """A pipeline with one device a stage, cut before the blocks ``cuts``."""
    edges = [0, *cuts, num_blocks]
    return Pipeline(
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
        stages=tuple(
            Stage(blocks=(start, stop), devices=(device,))
            for device, start, stop in zip(devices, edges[:-1], edges[1:], strict=True)
        ),
    )


def make_plan(*, pipelines: Sequence[Pipeline] | None = None) -> Plan:
    """A plan; by default two pipelines with other cuts and shares for `make_cluster`."""
    pipelines = pipelines or (
        make_pipeline(devices=("a:0", "b:0"), cuts=(6,), micro_batches=5),
        make_pipeline(devices=("a:1", "b:1"), cuts=(5,), micro_batches=3),
    )
    return Plan(
        schema_version=1,
        model="toy",
        seq_len=128,
        dtype="fp32",
        global_batch_size=sum(p.num_samples for p in pipelines),
        pipelines=tuple(pipelines),
    )
