"""What a plan costs: the price per hour of the devices that it uses, times the step time.

Left out: devices that a provider rents out in whole nodes only, storage, traffic, and the time
between runs. A device that is rented but that the plan does not use costs nothing here: give it up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError
from eth_cli.faults import some_of
from eth_cli.plan import Plan

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of training by a plan, in dollars (or whatever currency the prices are in)."""

    per_hour: float
    """Sum of the prices of the devices used [$/h]."""
    per_step: float
    """per_hour x step time [$]."""
    tokens_per_dollar: float
    """Tokens of a step / per_step."""


def price_per_hour(cluster: Cluster, devices: Iterable[str]) -> float | None:
    """Sum of the prices of some devices; None: one of them has no price."""
    total = 0.0
    for device in devices:
        price = cluster.type_of(device).price_per_hour
        if price is None:
            return None
        total += price
    return total


def cost_of(cluster: Cluster, plan: Plan, step_time_s: float) -> Cost | None:
    """What training by a plan costs; None: a device that it uses has no price."""
    per_hour = price_per_hour(cluster, (place.device for place in plan.ranks))
    if per_hour is None:
        return None
    per_step = per_hour * step_time_s / SECONDS_PER_HOUR
    return Cost(
        per_hour=per_hour,
        per_step=per_step,
        tokens_per_dollar=plan.global_batch_size * plan.seq_len / per_step,
    )


def check_prices(cluster: Cluster, *, file: str, excluded: Collection[str] = ()) -> None:
    """Raise ConfigError naming every type without a price of which a plan may use a device."""
    types = {d.type for d in cluster.devices.values() if d.id not in excluded}
    missing = sorted(t for t in types if cluster.device_types[t].price_per_hour is None)
    if missing:
        raise ConfigError.single(
            file,
            f"device_types.{missing[0]}.price_per_hour",
            f"is missing; --objective cost needs a price for {some_of(missing)}, such as "
            f"{missing[0]}: {{price_per_hour: 3.67}}",
        )
