"""Turns a measured run into our profile, cluster and plan.

The runs are of DeepSpeed's pipeline engine, which differs from our runtime in one thing that
counts: its transfers between stages are part of the compute stream, so both ends stand still.
Here they are therefore part of the stages' times. With tensor parallelism each device sends its
1/t of the tensor, and the receivers gather the whole inside their node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.reference.tables import Reference
from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node
from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.profile.table import BlockGroup, DeviceEntry, MemoryModel, Profile, ProfiledModel

BYTES_PER_PARAMETER = 24
"""As the reference states: weights, gradients, Adam 8, a copy for communication, one of
DeepSpeed's."""
GH200_PROCESS_BYTES = 5_060_000_000
"""Context and allocator reserve on GH200, as the reference states."""
PROCESS_BYTES = {False: 2_000_000_000, True: 3_000_000_000}
"""Elsewhere, by whether there is tensor parallelism: what the reference's planner reserves."""
ACCUMULATION_PASSES = 3
"""Adding a micro-batch's gradients to those before it reads both and writes the sum. The profile
is of single micro-batches, whose gradients are only written."""
MEMORY_BYTES_PER_S = {
    "GH-96": 4.0e12,
    "RTX-3090": 936e9,
    "RTX-2080": 616e9,
    "Titan-RTX": 672e9,
    "A100-40": 1555e9,
    "A100-80": 2039e9,
    "V100-16": 900e9,
}
"""Data sheets; the 11 GB of RTX-2080 are those of an RTX 2080 Ti."""


@dataclass(frozen=True, slots=True)
class Case:
    """A measured run in our formats."""

    profile: Profile
    cluster: Cluster
    plan: Plan


def imported(reference: Reference, case: Any) -> Case:
    """One case of measured_runs.json. Raises ValueError where it has no equal in our formats."""
    model, size = case["model"], case["micro_batch_size"]
    stages = case["stages"]
    if len({len(stage["replicas"]) for stage in stages}) != 1:
        raise ValueError("stages have different numbers of replicas")
    widths = {r["tp"] for stage in stages for r in stage["replicas"]}
    if len(widths) != 1:
        raise ValueError("replicas have different tensor-parallel widths")
    (width,) = widths
    ids, nodes = _nodes(stages)
    gpus = sorted({r["gpu"] for stage in stages for r in stage["replicas"]})
    num_layers = stages[-1]["layers"][1] + 1
    micro_batches = round(case["micro_batches_per_pipeline"])
    num_replicas = len(stages[0]["replicas"])
    plan = Plan(
        schema_version=1,
        model=model,
        seq_len=reference.profiles["models"][model]["sequence_length"],
        dtype="fp32",
        global_batch_size=num_replicas * micro_batches * size,
        pipelines=tuple(
            Pipeline(
                micro_batches=micro_batches,
                micro_batch_size=size,
                stages=tuple(
                    Stage(blocks=(s["layers"][0], s["layers"][1] + 1), devices=ids[i][j])
                    for i, s in enumerate(stages)
                ),
            )
            for j in range(num_replicas)
        ),
    )
    return Case(
        _profile(reference, case, gpus, width, num_layers, ids),
        cluster_of(reference, case["id"], gpus, nodes),
        plan,
    )


def cluster_of(
    reference: Reference, name: str, gpus: list[str], nodes: tuple[Node, ...]
) -> Cluster:
    """A cluster of such nodes; its own links stand for what the profile has no figure of."""
    capacities = reference.profiles["gpus"]["cluster_config"]
    slowest = min(
        (size / time_s for gpu in gpus for size, time_s in reference.rows("inter", gpu, 1)[-1:])
    )
    inside = min(size / time_s for g in gpus for size, time_s in reference.rows("intra", g, 2)[-1:])
    return Cluster(
        name=name,
        device_types={g: DeviceType(memory_bytes=capacities[g]["mem_per_gpu"]) for g in gpus},
        nodes=nodes,
        network=Network(
            intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=inside),
            inter_node=Link(latency_s=0.0, bandwidth_bytes_per_s=slowest),
        ),
    )


def _nodes(stages: Any) -> tuple[list[list[tuple[str, ...]]], tuple[Node, ...]]:
    """Device ids of every stage's replicas, and the nodes: each type's are filled one by one."""
    nodes: list[tuple[str, str, int]] = []
    free: dict[str, tuple[str, int, int]] = {}
    ids: list[list[tuple[str, ...]]] = [[] for _ in stages]
    for j in range(len(stages[0]["replicas"])):
        for i, stage in enumerate(stages):
            replica = stage["replicas"][j]
            gpu, width, in_node = replica["gpu"], replica["tp"], replica["gpus_in_node"]
            name, used, total = free.get(gpu, ("", 0, 0))
            if total - used < width:
                name, used, total = f"n{len(nodes)}", 0, max(in_node, width)
                nodes.append((name, gpu, total))
            ids[i].append(tuple(f"{name}:{used + k}" for k in range(width)))
            free[gpu] = (name, used + width, total)
    return ids, tuple(
        Node(name=name, devices=(DeviceGroup(type=gpu, count=total),)) for name, gpu, total in nodes
    )


def _profile(
    reference: Reference,
    case: Any,
    gpus: list[str],
    width: int,
    num_layers: int,
    ids: list[list[tuple[str, ...]]],
) -> Profile:
    model, size, stages = case["model"], case["micro_batch_size"], case["stages"]
    micro_batches = case["micro_batches_per_pipeline"]
    sizes = reference.memory(model, width)
    entries = {gpu: reference.monotone_times(model, gpu, width, size) for gpu in gpus}
    if None in entries.values() or num_layers > len(sizes["params_floats"]):
        raise ValueError("the reference has no profile of it")
    compute = []
    transfers = _transfers(reference, case, width, ids)
    for gpu in gpus:
        for layer in range(num_layers):
            entry = reference.compute(
                model, layer, f"layer-{layer}", gpu, width, size, entries[gpu]
            )
            extra = transfers.get((gpu, layer), 0.0)
            adding_s = (
                sizes["params_bytes"][layer]
                * ACCUMULATION_PASSES
                / MEMORY_BYTES_PER_S[gpu]
                * (micro_batches - 1)
                / micro_batches
            )
            first = any(i and layer == s["layers"][0] for i, s in enumerate(stages))
            # The input of a later stage came over the network: no layer's growth holds it.
            held = sizes["act_output_bytes"][layer - 1] * size if first else 0
            compute.append(
                entry.model_copy(
                    update={
                        # Half of them go with forwards, half with backwards.
                        "forward_s": entry.forward_s + extra / 2,
                        "backward_s": entry.backward_s + extra / 2 + adding_s,
                        "activation_bytes": entry.activation_bytes + held,
                    }
                )
            )
    constant = PROCESS_BYTES[width > 1]
    return Profile(
        schema_version=1,
        seq_len=reference.profiles["models"][model]["sequence_length"],
        dtype="fp32",
        model=ProfiledModel(
            name=model,
            blocks=tuple(
                BlockGroup(kind=f"layer-{i}", parameters=sizes["params_floats"][i] * width)
                for i in range(num_layers)
            ),
            # Transfers are in the stages' times, and what is received in their activations.
            boundary_bytes_per_sample=0,
        ),
        memory=MemoryModel(bytes_per_parameter=BYTES_PER_PARAMETER, process_bytes=constant),
        compute=tuple(compute),
        devices=tuple(
            DeviceEntry(
                type=gpu,
                optimizer_s_per_parameter=reference.optimizer_s_per_parameter(
                    model, width, entries[gpu]
                ),
                process_bytes=GH200_PROCESS_BYTES if gpu == "GH-96" else constant,
            )
            for gpu in gpus
        ),
        links=reference.links(gpus),
    )


def _transfers(
    reference: Reference, case: Any, width: int, ids: list[list[tuple[str, ...]]]
) -> dict[tuple[str, int], float]:
    """Time that both ways over a boundary take from its two stages, by (type, layer) [s].

    It is added to the last layer before the boundary and to the first behind it. Where replicas
    of one type have unlike neighbours, that of the slowest.
    """
    found: dict[tuple[str, int], float] = {}
    stages = case["stages"]
    sizes = reference.memory(case["model"], width)["act_output_bytes"]
    for i in range(len(stages) - 1):
        layer = stages[i]["layers"][1]
        num_bytes = sizes[layer] * case["micro_batch_size"]
        for j, (above, below) in enumerate(
            zip(stages[i]["replicas"], stages[i + 1]["replicas"], strict=True)
        ):
            across = ids[i][j][0].split(":")[0] != ids[i + 1][j][0].split(":")[0]
            both_s = sum(
                transfer_s(reference, source, target, num_bytes, width, across=across)
                for source, target in (
                    (above["gpu"], below["gpu"]),
                    (below["gpu"], above["gpu"]),
                )
            )
            for gpu, at in ((above["gpu"], layer), (below["gpu"], layer + 1)):
                found[gpu, at] = max(found.get((gpu, at), 0.0), both_s)
    return found


def transfer_s(
    reference: Reference, source: str, target: str, num_bytes: float, width: int, *, across: bool
) -> float:
    """A tensor between two groups: each device sends 1/t, receivers gather the rest [s]."""
    part = num_bytes / width
    gathering = reference.link("intra", target, target, width) if width > 1 else None
    if across:
        sending_s = reference.link("inter", source, target, width).transfer_s(part)
    else:
        sending_s = reference.link("intra", source, target, max(2, width)).transfer_s(part)
    if gathering is None:
        return sending_s
    return sending_s + (width - 1) * gathering.transfer_s(part)
