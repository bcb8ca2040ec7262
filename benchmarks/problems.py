"""Planning problems of any size: models, mixed clusters and profiles by stated formulas.

No torch and no hardware: times are FLOPs over a fixed part of a catalogue type's peak, with the
collectives of tensor parallelism; activations are those of Korthikanti et al. (2022) with fused
attention. Good enough to be like real profiles; nothing here is meant to predict a real cluster.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from eth_cli.catalogue import GPU_TYPES
from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node, catalogue_type
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
)

TYPES = ("A100-40", "V100-16", "L4", "RTX-3090", "T4")
"""In the order in which problems of one to five types take them."""
EFFICIENCY = 0.45
"""Part of a device's fp16 peak that training reaches."""
NODE_SIZE = 8
WIDTHS = (1, 2, 4, 8)
SIZES = (1, 2, 4)
INTRA_NODE = {"A100-40": 240e9, "V100-16": 120e9}
"""Bandwidth between devices of a node [bytes/s]; PCIe for the others."""
PCIE = 13e9


class Shape(NamedTuple):
    """A transformer's shape."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    key_value_share: float
    """Width of keys and values over the hidden size."""
    gated: bool
    seq_len: int


MODELS = {
    "opt-350m": Shape(24, 1024, 4096, 50272, 1.0, False, 2048),
    "gpt-neo-2.7b": Shape(32, 2560, 10240, 50257, 1.0, False, 2048),
    "llama3-8b": Shape(32, 4096, 14336, 128256, 0.25, True, 4096),
}


def mixed_cluster(num_devices: int, num_types: int, *, inter_node_gbps: float) -> Cluster:
    """As equal numbers of the first types as possible, in nodes of up to eight of one type."""
    nodes: list[Node] = []
    each, more = divmod(num_devices, num_types)
    for t, name in enumerate(TYPES[:num_types]):
        left = each + (t < more)
        while left:
            count = min(NODE_SIZE, left)
            index = len(nodes)
            nodes.append(Node(name=f"n{index}", devices=(DeviceGroup(type=name, count=count),)))
            left -= count
    return Cluster(
        name=f"{num_devices}x{num_types}",
        device_types={name: _known(name) for name in TYPES[:num_types]},
        nodes=tuple(nodes),
        network=Network(
            inter_node=Link(latency_s=20e-6, bandwidth_bytes_per_s=inter_node_gbps * 1e9 / 8)
        ),
    )


def _known(name: str) -> DeviceType:
    known = catalogue_type(name)
    assert known is not None
    return known


def cluster_yaml(cluster: Cluster) -> str:
    """A cluster of catalogue types as cluster YAML (JSON, which YAML includes)."""
    link = cluster.network.inter_node
    assert link is not None
    return json.dumps(
        {
            "name": f"c{cluster.name}",
            "nodes": [
                {
                    "name": node.name,
                    "devices": [{"type": g.type, "count": g.count} for g in node.devices],
                }
                for node in cluster.nodes
            ],
            "network": {
                "inter_node": {
                    "bandwidth": f"{link.bandwidth_bytes_per_s * 8 / 1e9:g}Gbps",
                    "latency": f"{link.latency_s * 1e6:g}us",
                }
            },
        }
    )


def profile(model: str, *, sizes: tuple[int, ...] = SIZES) -> Profile:
    """A half-precision profile of a model on every type of `TYPES`."""
    shape = MODELS[model]
    h, s = shape.hidden, shape.seq_len
    attention = h * h * (2 + 2 * shape.key_value_share)
    mlp = h * shape.feed_forward * (3 if shape.gated else 2)
    parameters = {
        "embedding": shape.vocabulary * h,
        "transformer": round(attention + mlp),
        "head": shape.vocabulary * h,
    }
    compute = []
    for name in TYPES:
        peak = GPU_TYPES[name].peak_flops["fp16"] * EFFICIENCY
        stream = GPU_TYPES[name].memory_bandwidth_bytes_per_s
        for width in WIDTHS:
            for b in sizes:
                tokens = b * s
                # Two all-reduces of the activations a pass, by ring, inside the node.
                link = INTRA_NODE.get(name, PCIE)
                shared = 2 * (width - 1) / width * tokens * h * 2 / link
                for kind, amount in parameters.items():
                    flops = 2 * tokens * amount
                    if kind == "transformer":
                        flops += 2 * tokens * s * h  # causal attention, scores and values
                    if kind == "embedding":
                        forward = tokens * h * 6 / stream
                        backward = forward + amount * 4 / width / stream
                    else:
                        calls = 2 if kind == "transformer" else 1
                        forward = flops / peak / width + calls * shared
                        backward = 2 * flops / peak / width + calls * shared
                    activations = {
                        "embedding": tokens * h * 2,
                        "transformer": round(tokens * h * (10 + 24 / width)),
                        "head": round(tokens * (h * 4 + shape.vocabulary * 6 / width)),
                    }[kind]
                    compute.append(
                        ComputeEntry(
                            device=name,
                            block=kind,
                            tensor_parallel=width,
                            micro_batch_size=b,
                            forward_s=forward,
                            backward_s=backward,
                            activation_bytes=activations,
                            recompute_activation_bytes=tokens * h * 2,
                            source="formula",
                        )
                    )
    return Profile(
        schema_version=1,
        seq_len=s,
        dtype="fp16",
        model=ProfiledModel(
            name=model,
            blocks=tuple(
                BlockGroup(
                    kind=kind,
                    count=shape.layers if kind == "transformer" else 1,
                    parameters=amount,
                )
                for kind, amount in parameters.items()
            ),
            boundary_bytes_per_sample=s * h * 2,
        ),
        memory=MemoryModel(
            bytes_per_parameter=18, process_bytes=1_500_000_000, optimizer_bytes_per_parameter=12
        ),
        compute=tuple(compute),
        devices=tuple(
            DeviceEntry(
                type=name,
                optimizer_s_per_parameter=30 / GPU_TYPES[name].memory_bandwidth_bytes_per_s,
            )
            for name in TYPES
        ),
    )
