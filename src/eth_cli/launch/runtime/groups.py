"""Process groups: created here and nowhere else, by all ranks, in one canonical order.

Every rank calls `dist.new_group` for every group, its own or not: groups created by subsets or in
different orders hang. Equal sets of owners share one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from eth_cli.launch.runtime.segments import SyncSegment, owner_sets
from eth_cli.launch.runtime.tensor_parallel import TensorGroup
from eth_cli.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The groups that one rank takes part in, beside the world."""

    pipeline: dist.ProcessGroup
    """The ranks of this rank's pipeline."""
    tensor: TensorGroup
    """The devices that share this rank's stage."""
    owners: dict[tuple[int, ...], dist.ProcessGroup]
    """Groups of two or more owners that sum the same gradients, by their ranks."""
    checkpoint: dist.ProcessGroup
    """All ranks, over gloo: what writes checkpoints beside the training talks in it. Keeps the
    bound that it was created with, for a disk may be much slower than a step."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every later collective, in the world group and in all of these.

        Transfers between stages keep the bound that their group was created with: gloo has no way
        to change it.
        """
        for group in (None, self.pipeline, self.tensor.group, *self.owners.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def create_groups(
    plan: Plan, segments: Sequence[SyncSegment], *, rank: int, timeout: timedelta
) -> Groups:
    """Create all groups of a plan: pipelines, their stages, owners by descending block, and all.

    Args:
        plan: The plan.
        segments: What is summed over whom; the same on every rank.
        rank: This process's rank in the world.
        timeout: Longest wait of any operation in the groups.
    """
    place = plan.ranks[rank]
    pipeline: dist.ProcessGroup | None = None
    tensor = TensorGroup()
    for i, stages in enumerate(plan.pipelines):
        members = [plan.ranks_of(i, s) for s in range(len(stages.stages))]
        group = dist.new_group(sorted(r for ranks in members for r in ranks), timeout=timeout)
        if i == place.pipeline:
            pipeline = group
        for s, ranks in enumerate(members):
            if len(ranks) == 1:
                continue
            group = dist.new_group(sorted(ranks), timeout=timeout)
            if (i, s) == (place.pipeline, place.stage):
                tensor = TensorGroup(width=len(ranks), index=ranks.index(rank), group=group)
    assert pipeline is not None  # every rank stands in a pipeline

    owners: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in owner_sets(segments):
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            owners[ranks] = group
    return Groups(
        pipeline=pipeline,
        tensor=tensor,
        owners=owners,
        checkpoint=dist.new_group(backend="gloo", timeout=timeout),
    )
