"""Why no plan exists, in numbers, and the nearest change that would make one: all computed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from eth_cli.errors import InfeasibleError
from eth_cli.search.cost import CostModel
from eth_cli.search.fit import Fit, Fitter
from eth_cli.search.request import SearchOptions, problem_of
from eth_cli.search.templates import Kind, Problem, TemplateStage
from eth_cli.units import format_bytes


def infeasible(
    model: CostModel,
    options: SearchOptions,
    *,
    kinds: Sequence[Kind],
    micro_batch_sizes: Sequence[int],
    unusable: Mapping[str, str],
    is_proved: bool,
) -> InfeasibleError:
    """The error for a search that found no plan.

    What lacks is told of the single pipeline that comes nearest to fitting, over any of the
    devices in any order. Each change that is named makes a single pipeline fit.

    Args:
        kinds: the usable devices.
        micro_batch_sizes: those that were searched; others of the profile are a possible change.
        unusable: types that no plan can use, and why.
        is_proved: whether it is certain that no plan exists.
    """
    verdict = "no plan exists" if is_proved else "no plan was found"
    total = options.global_batch_size
    attempts = closest_fits(problem_of(model, options, kinds, micro_batch_sizes))
    if not attempts:
        names = dict.fromkeys((*unusable, *(kind.device_type for kind in kinds)))
        binding = "; ".join(
            unusable.get(
                name,
                f"the profile has no entries of {name} at micro-batch size "
                f"{', '.join(map(str, micro_batch_sizes))}",
            )
            for name in names
        )
        suggestion = "a profile with every block of a type that the cluster has, at a micro-batch "
        suggestion += "size and a tensor-parallel width that this search may use"
    else:
        fit, fitter = min(attempts, key=lambda attempt: attempt[0].lacking_bytes)
        whole = fitter.micro_batch_size * fitter.micro_batches
        if fit.lacking_bytes > 0:
            binding = _what_lacks(fit, fitter)
            suggestion = "; or ".join(_changes(model, options, fit, fitter))
            if whole != total:
                suggestion += f"; each with a global batch of {whole} samples"
        else:
            binding = (
                f"no split of {total} samples over pipelines that fit in memory exists "
                f"with micro-batches of {', '.join(map(str, micro_batch_sizes))}"
            )
            suggestion = f"a global batch of {whole} samples"
    return InfeasibleError(
        f"{verdict}: {binding}; what would fit: {suggestion}",
        binding=binding,
        suggestion=suggestion,
    )


def closest_fits(problem: Problem) -> list[tuple[Fit, Fitter]]:
    """By micro-batch size that the profile has: the closest single pipeline for the whole batch.

    Sizes that divide the batch; only where none does, all that are not larger.
    """
    total = problem.global_batch_size
    sizes = [b for b in problem.micro_batch_sizes if total % b == 0] or [
        b for b in problem.micro_batch_sizes if b < total
    ]
    fitters = [Fitter(problem, micro_batch_size=b, micro_batches=total // b) for b in sizes]
    return [(fit, fitter) for fitter in fitters if (fit := fitter.closest()) is not None]


def _what_lacks(fit: Fit, fitter: Fitter) -> str:
    stage = fit.stages[fit.worst]
    kind = fitter.kinds[stage.kind]
    width = stage.tensor_parallel
    last = f" to {stage.stop - 1}" if stage.stop - stage.start > 1 else ""
    found = "" if fitter.is_exact else " found"
    recomputing = ", activations recomputed" if stage.recompute else ""
    return (
        f"the closest single pipeline{found} ({_in_order(fit.stages, fitter)}) puts block"
        f"{'s' if last else ''} {stage.start}{last} (stage {fit.worst} of {len(fit.stages)}, "
        f"{fit.num_in_flight} micro-batches of {fitter.micro_batch_size} samples in "
        f"flight{recomputing}) on {_group(kind.device_type, width)}: "
        f"{'it needs' if width == 1 else 'each needs'} "
        f"{format_bytes(kind.capacity_bytes + fit.lacking_bytes)}, "
        f"{kind.device_type} has {format_bytes(kind.capacity_bytes)}; {fit.lacking_bytes} bytes "
        f"({format_bytes(fit.lacking_bytes)}) are lacking"
    )


def _group(device_type: str, width: int) -> str:
    return device_type if width == 1 else f"a tensor-parallel group of {width} {device_type}"


def _in_order(stages: Sequence[TemplateStage], fitter: Fitter) -> str:
    """Groups from the first stage to the last, as ``2 x B, A``, ``B in groups of 4, A``."""
    runs = []
    for (k, width), run in itertools.groupby((s.kind, s.tensor_parallel) for s in stages):
        number = len(list(run))
        wide = f" in groups of {width}" * (width > 1)
        runs.append(f"{number} x " * (number > 1) + fitter.kinds[k].device_type + wide)
    return ", ".join(runs)


def _changes(model: CostModel, options: SearchOptions, fit: Fit, fitter: Fitter) -> list[str]:
    """Single changes after which one pipeline fits, nearest first; there is always one."""
    changes = []
    size, kinds = fitter.micro_batch_size, fitter.kinds
    sizes = [b for b in model.profile.micro_batch_sizes if b < size]
    for other, its_fitter in reversed(closest_fits(problem_of(model, options, kinds, sizes))):
        b = its_fitter.micro_batch_size
        if other.lacking_bytes == 0 and options.global_batch_size % b == 0:
            changes.append(f"micro-batch size {b}")
            break
    for allowed, what in (
        (
            replace(options, recompute=True),
            "recomputing activations, which this search was not allowed to (leave out "
            "--no-recompute)",
        ),
        (
            replace(options, tensor_parallel=None),
            "other tensor-parallel widths, which this search was not allowed (leave out "
            "--tensor-parallel)",
        ),
    ):
        if allowed != options:
            problem = problem_of(model, allowed, kinds, [size])
            again = Fitter(
                problem, micro_batch_size=size, micro_batches=fitter.micro_batches
            ).closest()
            if again is not None and again.lacking_bytes == 0:
                changes.append(what)
    more = [
        (needed.number, kind.capacity_bytes, needed.node_size, kind.device_type)
        for k, kind in enumerate(kinds)
        if (needed := fitter.devices_needed(k)) is not None
    ]
    if more:
        number, _, node_size, device_type = min(more)
        where = f" in nodes of {node_size}" * (node_size > 1)
        changes.append(f"{number} more {device_type}{where}")
    if not changes:
        changes.append(f"{fit.lacking_bytes} bytes more memory on every device")
    return changes
