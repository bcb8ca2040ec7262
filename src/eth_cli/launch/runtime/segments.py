"""Which ranks sum which parts of which gradients, in the one order of all ranks. Pure.

A segment of the plan is held by one tensor-parallel group of each pipeline. Where their widths
differ, each parameter that is shared out is cut into as many parts as the least common multiple of
the widths: the holders of a part, one in each group, sum it. Parameters that every rank of a group
holds are summed over all ranks, to which only the first of each group contributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from eth_cli.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Parts of shared-out parameters that have the same holders."""

    parts: tuple[int, int]
    """Half-open range, of `SyncSegment.num_parts`."""
    owners: tuple[int, ...]
    """Ranks that hold them, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSegment:
    """Blocks whose gradients the same groups of ranks sum."""

    blocks: tuple[int, int]
    """Half-open; of a tied weight, from its first to its last use."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each stage that holds them, in the order of its tensor-parallel group."""
    is_tied: bool = False
    """Whether this is the weight that embedding and head share, and nothing else."""

    @property
    def num_parts(self) -> int:
        """The least common multiple of the groups' widths."""
        return math.lcm(*map(len, self.groups))

    @property
    def owners(self) -> tuple[int, ...]:
        """All ranks that hold a part of it, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts by their holders, ascending."""
        found: list[Part] = []
        for i in range(self.num_parts):
            holders = (group[i * len(group) // self.num_parts] for group in self.groups)
            owners = tuple(sorted(holders))
            if found and found[-1].owners == owners:
                found[-1] = Part(parts=(found[-1].parts[0], i + 1), owners=owners)
            else:
                found.append(Part(parts=(i, i + 1), owners=owners))
        return tuple(found)


def sync_segments(plan: Plan, *, is_tied: bool) -> tuple[SyncSegment, ...]:
    """The segments by descending block, then the tied weight if its holders are others.

    Args:
        is_tied: whether embedding and head share their weight.
    """
    found = [
        SyncSegment(blocks=(segment.start, segment.stop), groups=_holders(plan, (segment.start,)))
        for segment in reversed(plan.segments)
    ]
    if is_tied:
        groups = _holders(plan, (0, plan.num_blocks - 1))
        # In pipelines of one stage it is like any other parameter of the embedding.
        if groups != found[-1].groups:
            found.append(SyncSegment(blocks=(0, plan.num_blocks), groups=groups, is_tied=True))
    return tuple(found)


def owner_sets(segments: Iterable[SyncSegment]) -> tuple[tuple[int, ...], ...]:
    """Every set of several ranks that sum something, each once, in canonical order."""
    sets = (
        owners
        for segment in segments
        if len(segment.groups) > 1
        for owners in (*(part.owners for part in segment.parts), segment.owners)
    )
    return tuple(owners for owners in dict.fromkeys(sets) if len(owners) > 1)


def _holders(plan: Plan, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        plan.ranks_of(i, s)
        for i, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if any(stage.blocks[0] <= block < stage.blocks[1] for block in blocks)
    )
