"""Small random planning problems on which brute force is possible."""

from __future__ import annotations

import itertools
import random

from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, LinkOverride, Network, Node
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    LinkEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
)

Instance = tuple[Cluster, Profile, int]
"""Cluster, profile, samples in a global batch."""


def make_instance(seed: int, *, max_devices: int = 6, max_blocks: int = 8) -> Instance:
    """Unequal blocks, two types also mixed in nodes, tight memory, links that matter.

    The memory is set so that a device holds one to all blocks; some instances are infeasible.
    """
    rng = random.Random(seed)
    num_blocks = rng.randint(3, max_blocks)
    types = ["fast", "slow"][: rng.choice([1, 2, 2, 2])]
    num_devices = rng.randint(2, max_devices)
    nodes = _nodes(rng, types, num_devices)
    sizes = rng.choice([(1,), (1, 2), (2,), (1, 2)])
    total = rng.choice([2, 4, 6, 8])
    # One kind a block: every block has its own cost, memory and parameters.
    parameters = [rng.randint(1_000, 60_000) for _ in range(num_blocks)]
    forward = [rng.uniform(0.5e-3, 4e-3) for _ in range(num_blocks)]
    activation = [rng.randint(20_000, 400_000) for _ in range(num_blocks)]
    slowness = {"fast": 1.0, "slow": rng.uniform(1.3, 4.0)}
    tied = rng.random() < 0.3
    tied_parameters = min(parameters[0], parameters[-1]) // 2 if tied else 0
    compute = tuple(
        ComputeEntry(
            device=t,
            block=f"block{i}",
            micro_batch_size=b,
            # Larger micro-batches are a little cheaper per sample, not by the same for all.
            forward_s=forward[i] * slowness[t] * b * (1 - 0.03 * (b - 1) * (i % 3)),
            backward_s=forward[i] * slowness[t] * b * 1.9 * (1 - 0.02 * (b - 1)),
            activation_bytes=activation[i] * b,
        )
        for t in types
        for i in range(num_blocks)
        for b in sizes
    )
    profile = Profile(
        schema_version=1,
        seq_len=16,
        dtype="fp32",
        model=ProfiledModel(
            name=f"random-{seed}",
            blocks=tuple(
                BlockGroup(kind=f"block{i}", parameters=p) for i, p in enumerate(parameters)
            ),
            boundary_bytes_per_sample=rng.choice([1_000, 50_000, 400_000]),
            tied_blocks=((0, num_blocks - 1),) if tied else (),
            tied_parameters=tied_parameters,
        ),
        memory=MemoryModel(bytes_per_parameter=16, process_bytes=rng.choice([0, 7_000])),
        compute=compute,
        devices=tuple(
            DeviceEntry(type=t, optimizer_s_per_parameter=1e-9 * slowness[t]) for t in types
        ),
        links=_links(rng, types),
    )
    whole = 16 * sum(parameters) + 2 * min(sizes) * sum(activation)
    cluster = Cluster(
        name="random",
        device_types={
            t: DeviceType(memory_bytes=int(whole * rng.choice([0.3, 0.5, 0.8, 1.5]))) for t in types
        },
        nodes=nodes,
        network=Network(
            intra_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e8, 1e9])),
            inter_node=Link(latency_s=5e-5, bandwidth_bytes_per_s=rng.choice([1e7, 1e8, 9e8])),
            overrides=(
                LinkOverride(
                    between=(nodes[0].name, nodes[1].name),
                    link=Link(latency_s=8e-5, bandwidth_bytes_per_s=3e7),
                ),
            )
            if len(nodes) > 1 and rng.random() < 0.2
            else (),
        ),
    )
    return cluster, profile, total


def _nodes(rng: random.Random, types: list[str], num_devices: int) -> tuple[Node, ...]:
    left = [rng.choice(types) for _ in range(num_devices)]
    nodes: list[Node] = []
    while left:
        size = min(len(left), rng.choice([1, 2, 3, 3, 4]))
        mine, left = left[:size], left[size:]
        nodes.append(
            Node(
                name=f"n{len(nodes)}",
                devices=tuple(DeviceGroup(type=t, count=mine.count(t)) for t in types if t in mine),
            )
        )
    return tuple(nodes)


def _links(rng: random.Random, types: list[str]) -> tuple[LinkEntry, ...]:
    if rng.random() < 0.6:
        return ()
    first, last = types[0], types[-1]
    entries = [
        LinkEntry(
            scope="inter_node",
            devices=(first, last),
            latency_s=7e-5,
            bandwidth_bytes_per_s=4e7,
        )
    ]
    if rng.random() < 0.5:
        entries.append(
            LinkEntry(
                scope="inter_node",
                devices=(first, last),
                flows=3,
                table=((1_000, 1.1e-4), (100_000, 4e-3)),
            )
        )
    return tuple(entries)


def make_whole_instance(seed: int, *, max_devices: int = 4, max_blocks: int = 6) -> Instance:
    """An instance of the whole space: widths, recomputation, three types, two sorts of nodes.

    Some are infeasible. Memory binds in most; links, overrides among them, matter in many.
    """
    rng = random.Random(f"whole-{seed}")
    types = ["fast", "middle", "slow"][: rng.choice([1, 2, 2, 3])]
    nodes = _two_sorts(rng, types, rng.randint(2, max_devices))
    num_blocks = rng.randint(3, max_blocks)
    sizes = rng.choice([(1, 2), (1, 2), (1, 3), (2, 4), (1,)])
    total = rng.choice([4, 6, 8] if min(sizes) == 2 else [3, 4, 5, 6, 7, 8])
    kinds = [f"block{rng.randint(0, num_blocks - 2)}" for _ in range(num_blocks)]
    known = sorted(set(kinds))
    parameters = {kind: rng.randint(1_000, 60_000) for kind in known}
    activation = {kind: rng.randint(20_000, 500_000) for kind in known}
    tied = rng.random() < 0.25
    profile = Profile(
        schema_version=1,
        seq_len=16,
        dtype="fp32",
        model=ProfiledModel(
            name=f"whole-{seed}",
            blocks=tuple(BlockGroup(kind=kind, parameters=parameters[kind]) for kind in kinds),
            boundary_bytes_per_sample=rng.choice([1_000, 50_000, 400_000]),
            tied_blocks=((0, num_blocks - 1),) if tied else (),
            tied_parameters=min(parameters[kinds[0]], parameters[kinds[-1]]) // 2 if tied else 0,
        ),
        memory=MemoryModel(
            bytes_per_parameter=16,
            process_bytes=rng.choice([0, 7_000]),
            optimizer_bytes_per_parameter=8,
        ),
        compute=_compute(rng, types, sizes, activation),
        devices=tuple(
            DeviceEntry(type=t, optimizer_s_per_parameter=rng.uniform(1e-9, 2e-8)) for t in types
        ),
        links=_links(rng, types),
    )
    whole = 16 * sum(profile.model.parameters) + 2 * min(sizes) * sum(activation[k] for k in kinds)
    names = [node.name for node in nodes]
    between = rng.choice([names[:2], names[-1:], [names[0], names[-1]]])
    cluster = Cluster(
        name="whole",
        device_types={
            t: DeviceType(memory_bytes=int(whole * rng.choice([0.2, 0.3, 0.45, 0.7, 1.2])))
            for t in types
        },
        nodes=nodes,
        network=Network(
            intra_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e8, 1e9])),
            inter_node=Link(latency_s=5e-5, bandwidth_bytes_per_s=rng.choice([1e7, 1e8, 9e8])),
            overrides=(
                LinkOverride(
                    between=tuple(dict.fromkeys(between)),
                    link=Link(latency_s=8e-5, bandwidth_bytes_per_s=rng.choice([2e7, 3e8])),
                ),
            )
            if rng.random() < 0.3
            else (),
        ),
    )
    return cluster, profile, total


def _two_sorts(rng: random.Random, types: list[str], num_devices: int) -> tuple[Node, ...]:
    """Nodes of two sorts, types mixed in them, in turns until the devices are used up."""
    sorts = [[rng.choice(types) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(2)]
    nodes: list[Node] = []
    while num_devices > 0:
        mine = sorts[len(nodes) % 2][:num_devices]
        num_devices -= len(mine)
        groups = tuple(DeviceGroup(type=t, count=mine.count(t)) for t in types if t in mine)
        nodes.append(Node(name=f"n{len(nodes)}", devices=groups))
    return tuple(nodes)


def _compute(
    rng: random.Random, types: list[str], sizes: tuple[int, ...], activation: dict[str, int]
) -> tuple[ComputeEntry, ...]:
    """Entries of every block kind; width 2 for some types, recomputation for all or none."""
    forward = {kind: rng.uniform(0.5e-3, 4e-3) for kind in activation}
    slowness = {t: rng.uniform(1.0, 1.0 + 2.5 * i) for i, t in enumerate(types)}
    recompute = rng.random() < 0.7
    entries = []
    for t in types:
        widths = {1: 1.0} if rng.random() < 0.35 else {1: 1.0, 2: rng.uniform(0.5, 0.9)}
        for (width, part), b, (i, kind) in itertools.product(
            widths.items(), sizes, enumerate(activation)
        ):
            forward_s = forward[kind] * slowness[t] * part * b * (1 - 0.03 * (b - 1) * (i % 3))
            entries.append(
                ComputeEntry(
                    device=t,
                    block=kind,
                    tensor_parallel=width,
                    micro_batch_size=b,
                    forward_s=forward_s,
                    backward_s=forward_s * 1.9,
                    activation_bytes=activation[kind] * b * 3 // (2 + width),
                    recompute_activation_bytes=activation[kind] * b // 12 if recompute else None,
                )
            )
    return tuple(entries)
