"""Cost tables for tests of the search, with one entry a block so that every number is in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node
from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    LinkEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
)


def profile_of(
    *,
    blocks: Mapping[str, Sequence[tuple[float, float]]],
    parameters: Sequence[int] | None = None,
    activations: Sequence[int] | None = None,
    micro_batch_sizes: Sequence[int] = (1,),
    boundary_bytes: int = 0,
    tied: tuple[int, ...] = (),
    tied_parameters: int = 0,
    optimizer_s_per_parameter: float = 0.0,
    bytes_per_parameter: float = 16.0,
    links: Sequence[LinkEntry] = (),
    tensor_parallel: Sequence[int] = (1,),
) -> Profile:
    """A profile; ``blocks`` gives each device type's (forward, backward) of every block [s].

    Times grow with the micro-batch size, and shrink with half the tensor-parallel width.
    """
    num_blocks = len(next(iter(blocks.values())))
    parameters = parameters or [1_000] * num_blocks
    activations = activations or [10_000] * num_blocks
    return Profile(
        schema_version=1,
        seq_len=8,
        dtype="fp32",
        model=ProfiledModel(
            name="table",
            blocks=tuple(BlockGroup(kind=f"k{i}", parameters=p) for i, p in enumerate(parameters)),
            boundary_bytes_per_sample=boundary_bytes,
            tied_blocks=(tied,) if tied else (),
            tied_parameters=tied_parameters,
        ),
        memory=MemoryModel(bytes_per_parameter=bytes_per_parameter, process_bytes=77),
        compute=tuple(
            ComputeEntry(
                device=device,
                block=f"k{i}",
                tensor_parallel=t,
                micro_batch_size=b,
                forward_s=forward * b / (1 if t == 1 else t / 2),
                backward_s=backward * b / (1 if t == 1 else t / 2),
                activation_bytes=activations[i] * b // t,
                recompute_activation_bytes=(activations[i] * b // t) // 10,
            )
            for device, times in blocks.items()
            for i, (forward, backward) in enumerate(times)
            for b in micro_batch_sizes
            for t in tensor_parallel
        ),
        devices=tuple(
            DeviceEntry(type=device, optimizer_s_per_parameter=optimizer_s_per_parameter)
            for device in blocks
        ),
        links=tuple(links),
    )


def cluster_of(
    *nodes: Mapping[str, int],
    memory_bytes: int = 10**9,
    memory: Mapping[str, int] | None = None,
    intra: tuple[float, float] = (1e-5, 1e9),
    inter: tuple[float, float] = (3e-5, 2e8),
    overrides: Any = (),
) -> Cluster:
    """Nodes n0, n1, ... with their devices by type; links as (latency, bandwidth)."""
    types = sorted({t for node in nodes for t in node})
    return Cluster(
        name="c",
        device_types={
            t: DeviceType(memory_bytes=(memory or {}).get(t, memory_bytes)) for t in types
        },
        nodes=tuple(
            Node(
                name=f"n{i}",
                devices=tuple(DeviceGroup(type=t, count=n) for t, n in node.items()),
            )
            for i, node in enumerate(nodes)
        ),
        network=Network(
            intra_node=Link(latency_s=intra[0], bandwidth_bytes_per_s=intra[1]),
            inter_node=Link(latency_s=inter[0], bandwidth_bytes_per_s=inter[1]),
            overrides=overrides,
        ),
    )


def plan_of(
    *pipelines: tuple[int, Sequence[tuple[int, int, str]]],
    size: int = 1,
    recompute: bool = False,
) -> Plan:
    """Pipelines as (micro-batches, [(start, stop, devices separated by blanks), ...])."""
    made = tuple(
        Pipeline(
            micro_batches=m,
            micro_batch_size=size,
            stages=tuple(
                Stage(blocks=(start, stop), devices=tuple(ids.split()), recompute=recompute)
                for start, stop, ids in stages
            ),
        )
        for m, stages in pipelines
    )
    return Plan(
        schema_version=1,
        model="table",
        seq_len=8,
        dtype="fp32",
        global_batch_size=sum(p.num_samples for p in made),
        pipelines=made,
    )
