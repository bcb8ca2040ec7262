"""Random planning problems of any size: odd counts, mixed nodes, tight memory, slow links."""

from __future__ import annotations

import itertools
import random

from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
)

Instance = tuple[Cluster, Profile, int]
"""Cluster, profile, samples in a global batch."""

TYPES = ("fast", "middle", "slow")


def random_problem(seed: int, *, max_devices: int) -> Instance:
    """Blocks as of a transformer: embedding, equal layers, a head. Some have no plan."""
    rng = random.Random(f"quality-{seed}")
    types = TYPES[: rng.randint(1, 3)]
    nodes: list[Node] = []
    left = rng.randint(1, max_devices)
    while left > 0:
        size = min(left, rng.choice([1, 2, 3, 4, 5, 7, 8]))
        left -= size
        mine = [rng.choice(types)] * size if rng.random() < 0.6 else rng.choices(types, k=size)
        groups = tuple(DeviceGroup(type=t, count=mine.count(t)) for t in types if t in mine)
        nodes.append(Node(name=f"n{len(nodes)}", devices=groups))
    num_layers = rng.choice([4, 7, 12, 18])
    parts = {"embedding": (1, 0.2), "layer": (num_layers, 1.0), "head": (1, rng.uniform(0.3, 2))}
    layer_parameters = rng.randint(100_000, 900_000)
    activation = rng.randint(500_000, 8_000_000)
    model = ProfiledModel(
        name=f"quality-{seed}",
        blocks=tuple(
            BlockGroup(kind=kind, count=count, parameters=int(layer_parameters * (0.5 + part)))
            for kind, (count, part) in parts.items()
        ),
        boundary_bytes_per_sample=rng.choice([10_000, 100_000, 1_000_000]),
        tied_blocks=((0, num_layers + 1),) if rng.random() < 0.3 else (),
        tied_parameters=layer_parameters // 2,
    )
    sizes = rng.choice([(1,), (1, 2), (1, 2, 4)])
    compute = []
    for i, t in enumerate(types):
        slowness = rng.uniform(1 + i, 1 + 2 * i)
        widths = rng.choice([(1,), (1, 2), (1, 2, 4)])
        for width, b, (kind, (_, part)) in itertools.product(widths, sizes, parts.items()):
            forward_s = 0.004 * part * slowness * b**0.95 / width**0.8
            compute.append(
                ComputeEntry(
                    device=t,
                    block=kind,
                    tensor_parallel=width,
                    micro_batch_size=b,
                    forward_s=forward_s,
                    backward_s=2 * forward_s,
                    activation_bytes=int(activation * part) * b // width,
                    recompute_activation_bytes=activation * b // 10,
                )
            )
    whole = 16 * sum(model.parameters) + activation * (num_layers + 2)
    cluster = Cluster(
        name="random",
        device_types={
            t: DeviceType(memory_bytes=int(whole * rng.choice([0.15, 0.3, 0.5, 0.8, 1.6])))
            for t in types
        },
        nodes=tuple(nodes),
        network=Network(
            intra_node=Link(latency_s=5e-6, bandwidth_bytes_per_s=rng.choice([5e9, 5e10])),
            inter_node=Link(latency_s=3e-5, bandwidth_bytes_per_s=rng.choice([1e8, 1e9, 1e10])),
        ),
    )
    profile = Profile(
        schema_version=1,
        seq_len=128,
        dtype="fp32",
        model=model,
        memory=MemoryModel(bytes_per_parameter=16, process_bytes=rng.choice([0, 1_000_000])),
        compute=tuple(compute),
        devices=tuple(DeviceEntry(type=t, optimizer_s_per_parameter=1e-9) for t in types),
    )
    num_devices = len(cluster.devices)
    return cluster, profile, rng.choice([2, 3, 4, 7]) * num_devices + 4 * rng.randint(0, 3)
