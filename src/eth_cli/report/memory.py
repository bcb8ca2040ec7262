"""Peak memory of every rank, predicted against measured."""

from __future__ import annotations

from collections.abc import Iterable

from eth_cli.events import Scalar
from eth_cli.plan import DeviceMemory, Plan
from eth_cli.report.figures import RankMemory
from eth_cli.search.simulate import Simulation

PEAK_MEMORY = "peak_memory_bytes"
"""Scalar: most memory that a rank has held so far."""


def rank_memory(
    plan: Plan, simulation: Simulation | None, scalars: Iterable[Scalar]
) -> tuple[RankMemory, ...]:
    """Peak memory by rank; of a resumed run the most of all its processes."""
    peaks: dict[int, int] = {}
    for scalar in scalars:
        if scalar.name == PEAK_MEMORY:
            peaks[scalar.rank] = max(peaks.get(scalar.rank, 0), int(scalar.value))
    predicted: dict[str, DeviceMemory] = {}
    if simulation is not None:
        predicted = {memory.device: memory for memory in simulation.memory}
    elif plan.predicted is not None:
        predicted = {memory.device: memory for memory in plan.predicted.memory}
    found = []
    for place in plan.ranks:
        figures = predicted.get(place.device)
        device_type = None if plan.cluster is None else plan.cluster.type_of(place.device)
        capacity = None if device_type is None else device_type.memory_bytes
        found.append(
            RankMemory(
                rank=place.rank,
                device=place.device,
                pipeline=place.pipeline,
                stage=place.stage,
                predicted_bytes=None if figures is None else figures.bytes,
                capacity_bytes=figures.capacity_bytes if figures is not None else capacity,
                measured_bytes=peaks.get(place.rank),
                is_emulated=device_type is not None and device_type.emulated,
            )
        )
    return tuple(found)
