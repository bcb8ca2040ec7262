"""Why no plan exists, in numbers, and the nearest change that would make one: all computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from eth_cli.errors import InfeasibleError
from eth_cli.search.cost import CostModel
from eth_cli.search.fit import Fit, Fitter
from eth_cli.search.templates import Kind, TemplateStage
from eth_cli.units import format_bytes


def infeasible(
    model: CostModel,
    *,
    kinds: Sequence[Kind],
    micro_batch_sizes: Sequence[int],
    all_micro_batch_sizes: Sequence[int],
    global_batch_size: int,
    is_proved: bool,
    recompute: bool = False,
) -> InfeasibleError:
    """The error for a search that found no plan.

    What lacks is told of the single pipeline that comes nearest to fitting, over any of the
    devices in any order. Each change that is named makes a single pipeline fit.

    Args:
        kinds: the usable devices.
        micro_batch_sizes: those that were searched; others of the profile are a possible change.
        is_proved: whether it is certain that no plan exists.
        recompute: whether stages were allowed to recompute activations.
    """
    verdict = "no plan exists" if is_proved else "no plan was found"
    attempts = closest_fits(model, kinds, micro_batch_sizes, global_batch_size, recompute=recompute)
    if not attempts:
        binding = (
            f"the profile has no entries of {', '.join(k.device_type for k in kinds)} at "
            f"micro-batch size {', '.join(map(str, micro_batch_sizes))}"
        )
        suggestion = "profile the missing micro-batch sizes"
    else:
        fit, fitter = min(attempts, key=lambda attempt: attempt[0].lacking_bytes)
        whole = fitter.micro_batch_size * fitter.micro_batches
        if fit.lacking_bytes > 0:
            binding = _what_lacks(fit, fitter)
            changes = _changes(model, fit, fitter, all_micro_batch_sizes, global_batch_size)
            suggestion = "; or ".join(changes)
            if whole != global_batch_size:
                suggestion += f"; each with a global batch of {whole} samples"
        else:
            binding = (
                f"no split of {global_batch_size} samples over pipelines that fit in memory exists "
                f"with micro-batches of {', '.join(map(str, micro_batch_sizes))}"
            )
            suggestion = f"a global batch of {whole} samples"
    return InfeasibleError(
        f"{verdict}: {binding}; what would fit: {suggestion}",
        binding=binding,
        suggestion=suggestion,
    )


def closest_fits(
    model: CostModel,
    kinds: Sequence[Kind],
    micro_batch_sizes: Sequence[int],
    total: int,
    *,
    recompute: bool = False,
) -> list[tuple[Fit, Fitter]]:
    """By micro-batch size that the profile has: the closest single pipeline for the whole batch.

    Sizes that divide the batch of ``total`` samples; only where none does, all that are not larger.
    """
    sizes = [b for b in micro_batch_sizes if total % b == 0] or [
        b for b in micro_batch_sizes if b < total
    ]
    fitters = [
        Fitter(model, kinds, micro_batch_size=b, micro_batches=total // b, recompute=again)
        for b in sizes
        for again in ((False, True) if recompute else (False,))
    ]
    return [(fit, fitter) for fitter in fitters if (fit := fitter.closest()) is not None]


def _what_lacks(fit: Fit, fitter: Fitter) -> str:
    stage = fit.stages[fit.worst]
    kind = fitter.kinds[stage.kind]
    last = f" to {stage.stop - 1}" if stage.stop - stage.start > 1 else ""
    found = "" if fitter.is_exact else " found"
    return (
        f"the closest single pipeline{found} ({_in_order(fit.stages, fitter)}) puts block"
        f"{'s' if last else ''} {stage.start}{last} (stage {fit.worst} of {len(fit.stages)}, "
        f"{fit.num_in_flight} micro-batches of {fitter.micro_batch_size} samples in flight) on "
        f"{kind.device_type}: it needs {format_bytes(kind.capacity_bytes + fit.lacking_bytes)}, "
        f"{kind.device_type} has {format_bytes(kind.capacity_bytes)}; {fit.lacking_bytes} bytes "
        f"({format_bytes(fit.lacking_bytes)}) are lacking"
    )


def _in_order(stages: Sequence[TemplateStage], fitter: Fitter) -> str:
    """Types from the first stage to the last, as ``2 x B, A``."""
    runs = []
    for k, run in itertools.groupby(stage.kind for stage in stages):
        number = len(list(run))
        runs.append(f"{number} x " * (number > 1) + fitter.kinds[k].device_type)
    return ", ".join(runs)


def _changes(
    model: CostModel, fit: Fit, fitter: Fitter, all_sizes: Sequence[int], global_batch_size: int
) -> list[str]:
    """Single changes after which one pipeline fits, nearest first; there is always one."""
    changes = []
    smaller = sorted((b for b in all_sizes if b < fitter.micro_batch_size), reverse=True)
    for other, its_fitter in closest_fits(
        model, fitter.kinds, smaller, global_batch_size, recompute=fitter.recompute
    ):
        b = its_fitter.micro_batch_size
        if other.lacking_bytes == 0 and global_batch_size % b == 0:
            changes.append(f"micro-batch size {b}")
            break
    recomputing = Fitter(
        model,
        fitter.kinds,
        micro_batch_size=fitter.micro_batch_size,
        micro_batches=fitter.micro_batches,
        recompute=True,
    ).closest()
    if not fitter.recompute and recomputing is not None and recomputing.lacking_bytes == 0:
        changes.append(
            "recomputing activations, which this search was not allowed to (leave out "
            "--no-recompute)"
        )
    more = [
        (number, kind.capacity_bytes, kind.device_type)
        for k, kind in enumerate(fitter.kinds)
        if (number := fitter.devices_needed(k)) is not None
    ]
    if more:
        number, _, device_type = min(more)
        changes.append(f"{number} more {device_type}")
    if not changes:
        changes.append(f"{fit.lacking_bytes} bytes more memory on every device")
    return changes
