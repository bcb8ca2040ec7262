"""What is asked of a search, checked against what the profile and the cluster have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError
from eth_cli.profile.table import Profile
from eth_cli.search.cost import CostModel
from eth_cli.search.memory import stage_memory
from eth_cli.search.pruning import Pruning
from eth_cli.search.templates import Kind, Problem
from eth_cli.units import format_bytes

HPP, UNEVEN_LAYERS, EVEN = "hpp", "uneven-layers", "even"
STRATEGIES = (HPP, UNEVEN_LAYERS, EVEN)
"""What `SearchOptions.strategy` may be."""

MAX_MICRO_BATCHES = 65_536
"""Micro-batches of a global batch, of the largest size that divides it: 64 for each of 1,024 GPUs.

A search takes no longer for more, but who draws a plan or runs it lists every action of a pipeline.
That of all these in one pipeline of 8 stages takes seconds and some hundred MiB in every worker.
"""
MAX_BLOCKS = 512
"""Blocks of a model; a cut's cost is a matter of pairs of blocks, so more take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What is asked of a search."""

    global_batch_size: int
    """Samples in one optimizer step."""
    micro_batch_size: int | None = None
    """The only micro-batch size to use; None: any that the profile has, chosen per pipeline."""
    strategy: str = HPP
    """One of `STRATEGIES`."""
    max_pipelines: int | None = None
    """Most pipelines of a plan; None: any number."""
    tensor_parallel: tuple[int, ...] | None = None
    """The only tensor-parallel widths to use; None: any that the profile has."""
    recompute: bool = True
    """Whether stages may recompute activations where the profile says what they then keep."""
    level_shares: bool = False
    """Whether the pipelines of a baseline may get unequal shares; those of hpp always may. No
    option of the command line: it serves to tell what shares alone are worth."""
    excluded: frozenset[str] = frozenset()
    """Ids of devices that no plan may use."""
    max_gap: float | None = None
    """The search ends once the gap, step time / bound - 1, is proved to be at most this."""
    time_limit_s: float | None = None
    """The search ends with the best plan so far when the caller's clock says so [s]."""
    budget: int = 300_000
    """Candidates that the exhaustive search may look at before it gives up on a proof."""
    no_prune: frozenset[str] = frozenset()
    """Rules of `pruning` that are switched off, to measure what they save."""

    def with_excluded(self, devices: Collection[str]) -> SearchOptions:
        """The same without some devices more, by id."""
        return replace(self, excluded=self.excluded | set(devices))


def micro_batch_sizes(
    profile: Profile, cluster: Cluster, options: SearchOptions
) -> tuple[int, ...]:
    """The micro-batch sizes to use. Raises ConfigError with both numbers where none can be."""
    total, asked = options.global_batch_size, options.micro_batch_size
    if total < 1:
        raise ConfigError.single("--global-batch-size", "", f"{total} must be 1 or more")
    if asked is not None:
        if asked < 1:
            raise ConfigError.single("--micro-batch-size", "", f"{asked} must be 1 or more")
        if asked > total:
            raise ConfigError.single(
                "--micro-batch-size",
                "",
                f"{asked} samples are more than the global batch of {total}; use at most {total}",
            )
        if total % asked:
            raise ConfigError.single(
                "--global-batch-size",
                "",
                f"{total} samples do not divide into micro-batches of {asked}; use "
                f"{total - total % asked} or {total - total % asked + asked} samples, or another "
                "micro-batch size",
            )
    types = sorted({d.type for d in cluster.devices.values()})
    known = [t for t in types if t in profile.device_types]
    if not known:
        raise ConfigError.single(
            "profile",
            "compute",
            f"has {', '.join(profile.device_types)}, but the cluster {cluster.name} has "
            f"{', '.join(types)}; profile those types",
        )
    kinds = set(profile.model.kinds)
    sizes = tuple(
        b
        for b in profile.micro_batch_sizes
        if any(
            all(
                profile.lookup(t, kind, tensor_parallel=width, micro_batch_size=b) is not None
                for kind in kinds
            )
            for t in known
            for width in profile.widths(t)
        )
    )
    listed = ", ".join(map(str, sizes)) or "none"
    if asked is not None:
        if asked not in sizes:
            raise ConfigError.single(
                "--micro-batch-size",
                "",
                f"{asked} is not in the profile, which has every block of {', '.join(known)} at "
                f"micro-batch size {listed}; use one of those or profile {asked}",
            )
        _check_size(total, (asked,), profile)
        return (asked,)
    usable = tuple(b for b in sizes if b <= total)
    if not usable:
        raise ConfigError.single(
            "--global-batch-size",
            "",
            f"{total} samples are fewer than one micro-batch; the profile has micro-batch sizes "
            f"{listed}",
        )
    _check_size(total, usable, profile)
    if not _can_sum_to(total, usable):
        raise ConfigError.single(
            "--global-batch-size",
            "",
            f"{total} samples are no sum of micro-batches of {listed} samples, which the profile "
            "has; use another batch or profile another size",
        )
    return usable


def _check_size(total: int, sizes: Sequence[int], profile: Profile) -> None:
    """Raise ConfigError where a search would take longer than anyone waits."""
    num_blocks = profile.model.num_blocks
    if num_blocks > MAX_BLOCKS:
        raise ConfigError.single(
            "profile",
            "model.blocks",
            f"are {num_blocks}; at most {MAX_BLOCKS} are planned; profile several as one block",
        )
    size = max((b for b in sizes if total % b == 0), default=max(sizes))
    number = -(-total // size)
    if number > MAX_MICRO_BATCHES:
        enough = [b for b in profile.micro_batch_sizes if total <= MAX_MICRO_BATCHES * b]
        whole = [b for b in enough if total % b == 0]
        if whole:
            advice = f"give --micro-batch-size {whole[0]}"
        elif enough:
            advice = f"use {total - total % enough[0]} samples, which micro-batches of {enough[0]} "
            advice += "divide,"
        else:
            advice = f"profile a size of at least {-(-total // MAX_MICRO_BATCHES)}"
        raise ConfigError.single(
            "--global-batch-size",
            "",
            f"{total} samples are {number} micro-batches of {size}; at most "
            f"{MAX_MICRO_BATCHES} are planned; {advice} or use a smaller batch",
        )


def _can_sum_to(total: int, sizes: Sequence[int]) -> bool:
    if any(total % b == 0 for b in sizes):
        return True
    # Bit i: whether i samples are a sum. One shift doubles the number of micro-batches.
    reach, mask = 1, (1 << (total + 1)) - 1
    for b in sizes:
        shift = b
        while shift <= total:
            reach = (reach | reach << shift) & mask
            shift *= 2
    return bool(reach >> total & 1)


def check_dtype(profile: Profile, cluster: Cluster) -> None:
    """Raise ConfigError if no device of the cluster can train in the profile's dtype."""
    types = sorted({d.type for d in cluster.devices.values()})
    lacking = {t: cluster.device_types[t].lacks_dtype(profile.dtype) for t in types}
    if all(lacking.values()):
        why = ", ".join(f"{name} {reason}" for name, reason in lacking.items())
        raise ConfigError.single(
            "profile",
            "dtype",
            f"is {profile.dtype}, which no device of cluster {cluster.name} can train in: {why}; "
            "profile in another dtype",
        )


def unusable_types(
    model: CostModel, sizes: Sequence[int], options: SearchOptions
) -> dict[str, str]:
    """Types of the cluster that no plan can use, and why."""
    found = {}
    for name in sorted({d.type for d in model.cluster.devices.values()}):
        reason = _why_unusable(model, name, sizes, options)
        if reason is not None:
            found[name] = reason
    return found


def _why_unusable(
    model: CostModel, name: str, sizes: Sequence[int], options: SearchOptions
) -> str | None:
    profile = model.profile
    lacking = model.cluster.device_types[name].lacks_dtype(profile.dtype)
    if lacking is not None:
        return f"{name} {lacking}, and the profile is for {profile.dtype}"
    widths = sorted(
        {w for w in profile.widths(name) for b in sizes if model.tables.has(name, w, b)}
    )
    if not widths:
        what = "no entry" if name not in profile.device_types else "not every block"
        listed = ", ".join(map(str, sizes))
        return f"the profile has {what} for {name} at micro-batch size {listed}"
    asked = options.tensor_parallel
    allowed = [w for w in widths if asked is None or w in asked]
    if not allowed:
        return (
            f"the profile has {name} at tensor-parallel width {_or(widths)} only, and the search "
            f"is limited to {_or(asked or ())}"
        )
    in_nodes = Counter(
        d.node
        for d in model.cluster.devices.values()
        if d.type == name and d.id not in options.excluded
    )
    most = max(in_nodes.values(), default=0)
    if most and most < min(allowed):
        return (
            f"a stage of it needs {min(allowed)} {name} in one node (tensor-parallel width "
            f"{_or(allowed)}), and no node has more than {most} that may be used"
        )
    # Where all are excluded that is the reason, and width does not matter.
    fitting = [w for w in allowed if w <= most] or allowed
    return _too_small(model, name, fitting, sizes, recompute=options.recompute)


def problem_of(
    model: CostModel,
    options: SearchOptions,
    kinds: Sequence[Kind],
    sizes: Sequence[int],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> Problem:
    """The problem that is asked, of some kinds of devices and micro-batch sizes.

    Raises:
        ConfigError: a rule that is to be switched off does not exist.
    """
    return Problem(
        model,
        kinds=kinds,
        micro_batch_sizes=sizes,
        global_batch_size=options.global_batch_size,
        tensor_parallel=options.tensor_parallel,
        recompute=options.recompute,
        excluded=options.excluded,
        pruning=Pruning.without(options.no_prune),
        is_over=is_over,
    )


def _or(widths: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(widths))))


def _too_small(
    model: CostModel, name: str, widths: Sequence[int], sizes: Sequence[int], *, recompute: bool
) -> str | None:
    """Why the memory of a type has no room for any stage; None: it has.

    A stage of fewer blocks needs no more, except that it may have a neighbour more. One that ends
    or begins where the model does has as few as its first or last block alone, so single blocks and
    the whole model, which has no neighbour, are all that has to be looked at.
    """
    num_blocks = model.profile.model.num_blocks
    stages = [(block, block + 1) for block in range(num_blocks)] + [(0, num_blocks)]
    tables = [
        model.tables.table(name, width, b)
        for width in widths
        for b in sizes
        if model.tables.has(name, width, b)
    ]
    least, (start, stop) = min(
        (
            stage_memory(
                model.profile, table, start=start, stop=stop, num_in_flight=1, recompute=again
            ).total_bytes,
            (start, stop),
        )
        for table in tables
        for again in ((False, True) if recompute and table.can_recompute else (False,))
        for start, stop in stages
    )
    capacity = model.cluster.device_types[name].memory_bytes
    if least <= capacity:
        return None
    what = f"block {start} alone" if stop - start == 1 else "the whole model, with no neighbour,"
    return (
        f"its memory is too small for any stage: {what} needs {format_bytes(least)}, {name} has "
        f"{format_bytes(capacity)}"
    )
