"""How well a running job uses its devices: computing share, model FLOP/s utilisation, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eth_cli.launch import precision
from eth_cli.launch.status import Status
from eth_cli.plan import Plan

_BACKWARD_PER_FORWARD = 2
"""FLOP of a backward per FLOP of its forward: one product for the input, one for the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """What a job's devices did in the last step; None where nothing is known."""

    mfu: float | None = None
    """Model FLOP/s utilisation: the FLOP that the model needs, recomputation not counted, over what
    all devices of the plan could do at their peaks in that time."""
    busy_share: float | None = None
    """Part of the step that devices computed, mean over those that told."""
    memory_bytes: int | None = None
    """Most memory that a rank has held, of the rank that is nearest to its capacity."""
    memory_share: float | None = None
    """The same as a part of that device's memory; None where a CPU process plays the device."""


class Gauge:
    """Reads the utilisation of a plan's job."""

    def __init__(self, plan: Plan) -> None:
        self._step_flops = _step_flops(plan)
        self._peak_flops = _peak_flops(plan)
        self._capacity: dict[int, int] = {}
        if plan.cluster is not None:
            for place in plan.ranks:
                device_type = plan.cluster.type_of(place.device)
                if not device_type.emulated:
                    self._capacity[place.rank] = device_type.memory_bytes

    def read(self, statuses: Mapping[int, Status], *, step_time_s: float) -> Utilisation:
        """The utilisation after a step that took ``step_time_s`` [s]."""
        busy = [s.busy_share for s in statuses.values() if s.busy_share is not None]
        memory = {r: s.memory_bytes for r, s in statuses.items() if s.memory_bytes is not None}
        shares = {r: memory[r] / self._capacity[r] for r in memory if r in self._capacity}
        mfu = None
        if self._step_flops is not None and self._peak_flops is not None and step_time_s > 0:
            mfu = self._step_flops / step_time_s / self._peak_flops
        fullest = max(shares, key=lambda r: (shares[r], -r), default=None)
        return Utilisation(
            mfu=mfu,
            busy_share=sum(busy) / len(busy) if busy else None,
            memory_bytes=max(memory.values(), default=None) if fullest is None else memory[fullest],
            memory_share=None if fullest is None else shares[fullest],
        )


def _step_flops(plan: Plan) -> float | None:
    """FLOP of forward and backward of the global batch; None without the model's shape."""
    spec = plan.model_spec
    if spec is None:
        return None
    forward = sum(
        spec.forward_flops(index, micro_batch_size=1, seq_len=plan.seq_len)
        for index in range(spec.num_blocks)
    )
    return (1.0 + _BACKWARD_PER_FORWARD) * forward * plan.global_batch_size


def _peak_flops(plan: Plan) -> float | None:
    """What all devices can do together [FLOP/s]; None where that is not known of each."""
    if plan.cluster is None:
        return None
    total = 0.0
    for place in plan.ranks:
        device_type = plan.cluster.type_of(place.device)
        peak = device_type.peak_flops.get(precision.rank_dtype(plan, place.rank))
        if device_type.emulated or peak is None:
            return None
        total += peak
    return total
