"""Process groups: created here and nowhere else, by all ranks, in one canonical order.

Every rank calls `dist.new_group` for every group, its own or not: groups created by subsets or in
different orders hang. Equal sets of owners share one group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from eth_cli.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The groups that one rank takes part in, beside the world."""

    pipeline: dist.ProcessGroup
    """The ranks of this rank's pipeline."""
    pipeline_ranks: tuple[int, ...]
    """Their global ranks, by group rank (ascending)."""
    owners: dict[tuple[int, ...], dist.ProcessGroup]
    """Groups of two or more owners that hold the same blocks, by their ranks."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every later collective, in the world group and in all of these.

        Transfers between stages keep the bound that their group was created with: gloo has no way
        to change it.
        """
        for group in (None, self.pipeline, *self.owners.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def create_groups(
    plan: Plan,
    *,
    rank: int,
    extra_owners: Iterable[tuple[int, ...]] = (),
    timeout: timedelta,
) -> Groups:
    """Create all groups of a plan: pipelines in order, then owners by descending block.

    Args:
        plan: The plan.
        rank: This process's rank in the world.
        extra_owners: Further sets of owners, ascending, such as those of a tied weight; the same
            on every rank.
        timeout: Longest wait of any operation in the groups.
    """
    mine = plan.ranks[rank].pipeline
    pipeline: dist.ProcessGroup | None = None
    for i, stages in enumerate(plan.pipelines):
        ranks = [r for s in range(len(stages.stages)) for r in plan.ranks_of(i, s)]
        group = dist.new_group(sorted(ranks), timeout=timeout)
        if i == mine:
            pipeline, pipeline_ranks = group, tuple(sorted(ranks))
    assert pipeline is not None  # every rank stands in a pipeline

    owners: dict[tuple[int, ...], dist.ProcessGroup] = {}
    wanted = [segment.owners for segment in reversed(plan.segments)]
    for ranks_of_group in dict.fromkeys([*wanted, *extra_owners]):
        if len(ranks_of_group) > 1:
            group = dist.new_group(list(ranks_of_group), timeout=timeout)
            if rank in ranks_of_group:
                owners[ranks_of_group] = group
    return Groups(pipeline=pipeline, pipeline_ranks=pipeline_ranks, owners=owners)
