"""What each device of a plan computes in, and what is handed between them. Pure.

A plan has one dtype, which its profile was measured in. A device that cannot compute in it (a V100
or T4 has no bf16) computes in the next best that it can: fp16, with a scaled loss. What crosses the
boundary between two stages has the plan's own dtype everywhere, which every device can hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from eth_cli.cluster import DeviceType
from eth_cli.plan import Plan


def device_dtype(plan_dtype: str, device: DeviceType | None) -> str:
    """What a device of a type computes in under a plan of ``plan_dtype``."""
    if device is None or device.lacks_dtype(plan_dtype) is None:
        return plan_dtype
    return "fp16"


def rank_dtype(plan: Plan, rank: int) -> str:
    """What a rank computes in."""
    cluster = plan.cluster
    device = None if cluster is None else cluster.type_of(plan.ranks[rank].device)
    return device_dtype(plan.dtype, device)


def used_dtypes(plan: Plan) -> frozenset[str]:
    """Everything that some device of a plan computes in."""
    return frozenset(rank_dtype(plan, place.rank) for place in plan.ranks)


def scales_loss(plan: Plan) -> bool:
    """Whether gradients are computed of a scaled loss, so that fp16 holds small ones."""
    return "fp16" in used_dtypes(plan)


def notes(plan: Plan) -> Iterator[str]:
    """What a person should know of a plan whose devices compute in several dtypes, a line each."""
    if len(used_dtypes(plan)) == 1:
        return
    cluster = plan.cluster
    assert cluster is not None  # without one nothing is known of the devices
    types = sorted({cluster.devices[place.device].type for place in plan.ranks})
    others = [
        f"{name} in {own}"
        for name in types
        if (own := device_dtype(plan.dtype, cluster.device_types[name])) != plan.dtype
    ]
    yield (
        f"{', '.join(others)}, which has no {plan.dtype}; all other devices compute in "
        f"{plan.dtype}, and so is what stages hand each other"
    )
