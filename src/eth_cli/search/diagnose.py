"""Why no plan exists, in numbers, and the nearest change that would make one: all computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eth_cli.errors import InfeasibleError
from eth_cli.schedule import num_in_flight
from eth_cli.search.cost import CostModel
from eth_cli.search.memory import StageMemory, stage_memory
from eth_cli.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The cut of the whole model over some devices that comes nearest to fitting."""

    lacking_bytes: int
    """What its worst stage lacks; 0 or less: it fits [bytes]."""
    stage: int
    blocks: tuple[int, int]
    device_type: str
    num_in_flight: int
    memory: StageMemory
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Devices and options that a fit is asked for."""

    device_types: tuple[str, ...]
    """One a stage, first stage first."""
    micro_batch_size: int
    global_batch_size: int
    recompute: bool = False


def closest_fit(model: CostModel, setting: Setting) -> Fit | None:
    """One pipeline over all devices, cut so that its worst stage lacks least; None: no profile.

    Exact by dynamic programming over (stage, first block), for the whole batch in one pipeline.
    """
    types, b = setting.device_types, setting.micro_batch_size
    num_blocks = model.profile.model.num_blocks
    num_stages = len(types)
    if num_stages > num_blocks or not all(model.tables.has(t, 1, b) for t in set(types)):
        return None
    if setting.recompute and not all(model.tables.table(t, 1, b).can_recompute for t in types):
        return None
    infinite = float("inf")
    best: list[float] = [infinite] * num_blocks + [-infinite]
    stops: list[list[int]] = []
    fits: dict[tuple[int, int, int], Fit] = {}
    for s in range(num_stages - 1, -1, -1):
        row, row_stops = [infinite] * (num_blocks + 1), [0] * (num_blocks + 1)
        for start in range(num_blocks):
            for stop in range(start + 1, num_blocks + 1):
                if best[stop] == infinite:
                    continue
                fit = _stage_fit(model, setting, s, start, stop)
                fits[s, start, stop] = fit
                worst = max(float(fit.lacking_bytes), best[stop])
                if worst < row[start]:
                    row[start], row_stops[start] = worst, stop
        best = row
        stops.append(row_stops)
    start, chosen = 0, []
    for s, row_stops in enumerate(reversed(stops)):
        chosen.append(fits[s, start, row_stops[start]])
        start = row_stops[start]
    return max(chosen, key=lambda fit: fit.lacking_bytes)


def _stage_fit(model: CostModel, setting: Setting, s: int, start: int, stop: int) -> Fit:
    device_type = setting.device_types[s]
    in_flight = num_in_flight(
        s,
        num_stages=len(setting.device_types),
        num_micro_batches=setting.global_batch_size // setting.micro_batch_size,
    )
    memory = stage_memory(
        model.profile,
        model.tables.table(device_type, 1, setting.micro_batch_size),
        start=start,
        stop=stop,
        num_in_flight=in_flight,
        recompute=setting.recompute,
    )
    capacity = model.cluster.device_types[device_type].memory_bytes
    return Fit(
        lacking_bytes=memory.total_bytes - capacity,
        stage=s,
        blocks=(start, stop),
        device_type=device_type,
        num_in_flight=in_flight,
        memory=memory,
        capacity_bytes=capacity,
    )


def infeasible(
    model: CostModel,
    *,
    device_types: Sequence[str],
    micro_batch_sizes: Sequence[int],
    all_micro_batch_sizes: Sequence[int],
    global_batch_size: int,
) -> InfeasibleError:
    """The error for a search that found no plan.

    Args:
        device_types: the type of every usable device.
        micro_batch_sizes: those that were searched; others of the profile are a possible change.
    """
    memory = {t: model.cluster.device_types[t].memory_bytes for t in device_types}
    ordered = sorted(device_types, key=lambda t: (-memory[t], t))
    ordered = ordered[: model.profile.model.num_blocks]
    sizes = [b for b in micro_batch_sizes if global_batch_size % b == 0] or [min(micro_batch_sizes)]
    settings = [
        Setting(
            device_types=tuple(ordered), micro_batch_size=b, global_batch_size=global_batch_size
        )
        for b in sizes
    ]
    pairs = [(closest_fit(model, setting), setting) for setting in settings]
    known = [(fit, setting) for fit, setting in pairs if fit is not None]
    if not known:
        binding = (
            "no micro-batch size of the profile "
            f"({', '.join(map(str, micro_batch_sizes))}) has entries for all of "
            f"{', '.join(sorted(set(device_types)))}"
        )
        return InfeasibleError(
            f"no plan exists: {binding}",
            binding=binding,
            suggestion="profile the missing micro-batch sizes",
        )
    fit, setting = min(known, key=lambda pair: pair[0].lacking_bytes)
    if fit.lacking_bytes > 0:
        binding = (
            f"the closest cut puts blocks {fit.blocks[0]} to {fit.blocks[1] - 1} (stage {fit.stage}"
            f" of {len(setting.device_types)}, {fit.num_in_flight} micro-batches of "
            f"{setting.micro_batch_size} samples in flight) on {fit.device_type}: it needs "
            f"{format_bytes(fit.memory.total_bytes)}, {fit.device_type} has "
            f"{format_bytes(fit.capacity_bytes)}; {fit.lacking_bytes} bytes "
            f"({format_bytes(fit.lacking_bytes)}) are lacking"
        )
    else:
        binding = (
            f"no split of {global_batch_size} samples over pipelines that fit in memory exists "
            f"with micro-batches of {', '.join(map(str, micro_batch_sizes))}"
        )
    changes = _changes(model, setting, all_micro_batch_sizes)
    suggestion = "; or ".join(changes) or "use devices with more memory"
    return InfeasibleError(
        f"no plan exists: {binding}; what would fit: {suggestion}",
        binding=binding,
        suggestion=suggestion,
    )


def _changes(model: CostModel, setting: Setting, all_sizes: Sequence[int]) -> list[str]:
    """Single changes after which one pipeline over all devices fits, nearest first."""
    changes = []
    smaller = [b for b in all_sizes if b < setting.micro_batch_size]
    for b in sorted(smaller, reverse=True):
        if setting.global_batch_size % b == 0 and _fits(model, setting, micro_batch_size=b):
            changes.append(f"micro-batch size {b}")
            break
    if _fits(model, setting, recompute=True):
        changes.append("recomputing activations")
    more = [
        (number, t)
        for t in sorted(set(setting.device_types))
        if (number := _devices_needed(model, setting, t)) is not None
    ]
    if more:
        number, device_type = min(more)
        changes.append(f"{number} more {device_type}")
    return changes


def _fits(
    model: CostModel,
    setting: Setting,
    *,
    device_types: tuple[str, ...] | None = None,
    micro_batch_size: int | None = None,
    recompute: bool = False,
) -> bool:
    fit = closest_fit(
        model,
        Setting(
            device_types=device_types or setting.device_types,
            micro_batch_size=micro_batch_size or setting.micro_batch_size,
            global_batch_size=setting.global_batch_size,
            recompute=recompute,
        ),
    )
    return fit is not None and fit.lacking_bytes <= 0


def _devices_needed(model: CostModel, setting: Setting, device_type: str) -> int | None:
    """The fewest more devices of a type with which one pipeline fits; None: no number does."""
    memory = model.cluster.device_types
    room = model.profile.model.num_blocks - len(setting.device_types)

    def with_more(number: int) -> tuple[str, ...]:
        types = (*setting.device_types, *(device_type,) * number)
        return tuple(sorted(types, key=lambda t: (-memory[t].memory_bytes, t)))

    for number in range(1, room + 1):
        if _fits(model, setting, device_types=with_more(number)):
            return number
    return None
