"""A profile without hardware: exact activation bytes, counted FLOPs, times by a stated roofline.

Works for any model and any device type with a peak. Every entry says ``source: analytic``. What
the times assume and leave out is in `profile.roofline`; what is counted, in `profile.activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from eth_cli.catalogue import DTYPES
from eth_cli.cluster import Cluster, DeviceType
from eth_cli.errors import ConfigError, Fault
from eth_cli.model import (
    BYTES_PER_ELEMENT,
    ModelSpec,
    check_micro_batch_size,
    check_seq_len,
)
from eth_cli.profile.roofline import (
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    BlockTrace,
    Roofline,
)
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    Dtype,
    MemoryModel,
    Profile,
    ProfiledModel,
)

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""

PROCESS_BYTES = 1_500_000_000
"""Memory that a training process takes on a real GPU before it holds any block: CUDA context and
kernels (0.4 to 0.6 GB), NCCL's buffers for a few communicators (about 0.5 GB), cuBLAS workspaces
and what the caching allocator cannot reuse (about 0.4 GB). Assumed; measured mode measures it."""

OPTIMIZER_BYTES_PER_PARAMETER = {"fp32": 8, "bf16": 12, "fp16": 12}
"""What a sharded optimizer splits: Adam's two fp32 moments, and the fp32 master weight that half
precision needs."""
BYTES_PER_PARAMETER = {"fp32": 16, "bf16": 18, "fp16": 18}
"""fp32: weight 4, gradient 4, moments 8. Half precision: weight 2, fp32 gradient 4, master 4,
moments 8."""


def analytic_profile(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    seq_len: int,
    dtype: str,
    micro_batch_sizes: Sequence[int],
    progress: Progress | None = None,
) -> Profile:
    """The profile of a model on every device type that a cluster uses.

    Args:
        seq_len: tokens of a sample.
        dtype: one of `catalogue.DTYPES`.
        micro_batch_sizes: samples of a micro-batch, each to be profiled.
        progress: told of each step.

    Raises:
        ConfigError: the sequence is too long for the model, or a device type lacks the dtype.
    """
    check_request(spec, seq_len=seq_len, dtype=dtype, micro_batch_sizes=micro_batch_sizes)
    types = used_types(cluster)
    rooflines = rooflines_of(cluster, types, dtype=dtype)
    sizes = sorted(set(micro_batch_sizes))
    traces = trace_blocks(
        spec, seq_len=seq_len, dtype=dtype, micro_batch_sizes=sizes, progress=progress
    )
    return Profile(
        schema_version=1,
        seq_len=seq_len,
        dtype=cast(Dtype, dtype),
        model=profiled_model(spec, seq_len=seq_len, dtype=dtype),
        memory=memory_model(cluster, types, dtype=dtype),
        compute=compute_entries(rooflines, traces),
        devices=device_entries(cluster, rooflines, dtype=dtype),
    )


def check_request(
    spec: ModelSpec, *, seq_len: int, dtype: str, micro_batch_sizes: Sequence[int]
) -> None:
    """Raise ConfigError unless the model can be profiled so."""
    if dtype not in DTYPES:
        raise ConfigError.single(
            "--dtype", "", f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}"
        )
    if seq_len < 1:
        raise ConfigError.single("--seq-len", "", f"{seq_len} tokens are too few; use 1 or more")
    check_seq_len(spec, seq_len, file="--seq-len")
    bad = [size for size in micro_batch_sizes if size < 1]
    if bad or not micro_batch_sizes:
        raise ConfigError.single(
            "--micro-batch-sizes",
            "",
            f"{bad[0]} samples are too few; use 1 or more" if bad else "name at least one",
        )
    check_micro_batch_size(
        spec, max(micro_batch_sizes), seq_len=seq_len, file="--micro-batch-sizes"
    )


def used_types(cluster: Cluster) -> tuple[str, ...]:
    """The device types that a cluster's nodes have, by name."""
    return tuple(sorted({group.type for node in cluster.nodes for group in node.devices}))


def rooflines_of(cluster: Cluster, types: Sequence[str], *, dtype: str) -> dict[str, Roofline]:
    """What each device type attains in a dtype.

    Raises:
        ConfigError: with every type that lacks the dtype, and what it has.
    """
    faults = []
    for name in types:
        message = _unsupported(name, cluster.device_types[name], dtype)
        if message is not None:
            faults.append(
                Fault(
                    file=f"cluster {cluster.name}",
                    field=f"device_types.{name}.peak",
                    message=message + _common_dtypes(cluster, types),
                )
            )
    if faults:
        raise ConfigError(faults)
    return {name: _roofline(cluster.device_types[name], dtype) for name in types}


def _unsupported(name: str, device_type: DeviceType, dtype: str) -> str | None:
    """Why a type cannot be estimated in a dtype; None when it can."""
    peak = device_type.peak_flops.get(dtype)
    if peak is None:
        known = ", ".join(sorted(device_type.peak_flops)) or "none"
        return f"{name} has no {dtype} peak (it has: {known})"
    reason = device_type.lacks_dtype(dtype)
    if reason is not None:
        return f"{name} {reason}"
    return None if peak > 0 else f"{name} has a {dtype} peak of {peak} FLOP/s, not above 0"


def _common_dtypes(cluster: Cluster, types: Sequence[str]) -> str:
    common = [
        dtype
        for dtype in DTYPES
        if all(_unsupported(t, cluster.device_types[t], dtype) is None for t in types)
    ]
    if common:
        return f"; every type of the cluster has {', '.join(common)}: use --dtype {common[0]}"
    return "; no dtype is common to all types of the cluster: give each a peak of one"


def _roofline(device_type: DeviceType, dtype: str) -> Roofline:
    """An emulated device attains exactly its figures; a real one the stated part of them."""
    compute, memory = (1.0, 1.0) if device_type.emulated else (MATMUL_EFFICIENCY, MEMORY_EFFICIENCY)
    bandwidth = device_type.memory_bandwidth_bytes_per_s
    return Roofline(
        flops_per_s=device_type.peak_flops[dtype] * compute,
        bytes_per_s=None if bandwidth is None else bandwidth * memory,
    )


def distinct_blocks(spec: ModelSpec) -> dict[str, int]:
    """One block index of each kind: all layers are alike, so three blocks stand for any model."""
    indices = (0, 1, spec.num_blocks - 1)
    return {spec.block_kind(index): index for index in indices}


def trace_blocks(
    spec: ModelSpec,
    *,
    seq_len: int,
    dtype: str,
    micro_batch_sizes: Sequence[int],
    progress: Progress | None = None,
) -> dict[tuple[str, int], BlockTrace]:
    """What each kind of block costs, by (kind, micro-batch size)."""
    # Loads torch, which takes longer than the rest; whoever only plans never comes here.
    from eth_cli.profile import activations

    steps = [(k, i, size) for k, i in distinct_blocks(spec).items() for size in micro_batch_sizes]
    traces = {}
    for done, (kind, index, size) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), f"{kind}, micro-batch size {size}")
        traces[kind, size] = activations.trace_block(
            spec, index, dtype=dtype, micro_batch_size=size, seq_len=seq_len
        )
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return traces


def compute_entries(
    rooflines: dict[str, Roofline], traces: dict[tuple[str, int], BlockTrace]
) -> tuple[ComputeEntry, ...]:
    """Times and memory of each kind of block on each device type."""
    return tuple(
        ComputeEntry(
            device=name,
            block=kind,
            micro_batch_size=size,
            forward_s=roofline.time_s(trace.forward),
            backward_s=roofline.time_s(trace.backward),
            activation_bytes=trace.activation_bytes,
            recompute_activation_bytes=trace.recompute_activation_bytes,
            source="analytic",
        )
        for name, roofline in rooflines.items()
        for (kind, size), trace in traces.items()
    )


def device_entries(
    cluster: Cluster, rooflines: dict[str, Roofline], *, dtype: str
) -> tuple[DeviceEntry, ...]:
    """The optimizer's time on each device type; an emulated one has no process constant."""
    return tuple(
        DeviceEntry(
            type=name,
            optimizer_s_per_parameter=roofline.optimizer_s_per_parameter(dtype),
            process_bytes=0 if cluster.device_types[name].emulated else PROCESS_BYTES,
        )
        for name, roofline in rooflines.items()
    )


def profiled_model(spec: ModelSpec, *, seq_len: int, dtype: str) -> ProfiledModel:
    """The model as the planner sees it."""
    head = spec.num_blocks - 1
    return ProfiledModel(
        name=spec.name,
        blocks=tuple(
            BlockGroup(
                kind=kind,
                count=spec.num_layers if index not in (0, head) else 1,
                parameters=spec.block_parameters(index),
            )
            for kind, index in distinct_blocks(spec).items()
        ),
        boundary_bytes_per_sample=spec.boundary_bytes_per_sample(seq_len, BYTES_PER_ELEMENT[dtype]),
        tied_blocks=((0, head),) if spec.tied else (),
        tied_parameters=spec.tied_parameters,
        spec=spec,
    )


def memory_model(cluster: Cluster, types: Sequence[str], *, dtype: str) -> MemoryModel:
    """Bytes of each parameter, and the process constant of real GPUs (0 where all are emulated)."""
    all_emulated = all(cluster.device_types[name].emulated for name in types)
    return MemoryModel(
        bytes_per_parameter=BYTES_PER_PARAMETER[dtype],
        process_bytes=0 if all_emulated else PROCESS_BYTES,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES_PER_PARAMETER[dtype],
    )
