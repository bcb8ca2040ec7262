"""Block-wise gradient sums over the owners of each segment, hidden under the backward pass.

Pipelines cut the model at different blocks, so gradients are summed segment by segment over the
ranks that own it. A segment's gradients lie in one flat buffer whose pieces are the parameters'
``.grad``: nothing is copied, and the buffer is the only memory beside weights and Adam's moments.
Its all-reduce is launched from the gradient hook that completes its last block.

Deadlock: every rank launches its segments by descending block index and a tied weight last. Any two
ranks so launch the collectives that they share in the same order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from eth_cli.launch.runtime.groups import Groups
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.runtime.stage import OwnedParameter
from eth_cli.model import ModelSpec
from eth_cli.models.build import TIED_WEIGHT
from eth_cli.plan import Plan


def tied_owners(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Ranks that hold the weight shared by embedding and head, ascending; empty without one."""
    if not spec.tied:
        return ()
    ends = (plan.block_owners(0), plan.block_owners(plan.num_blocks - 1))
    return tuple(sorted(set(ends[0]) | set(ends[1])))


@dataclass(kw_only=True, slots=True)
class Bucket:
    """The gradients that one set of owners sums together."""

    blocks: tuple[int, int]
    """Half-open range of blocks that the gradients come from."""
    owners: tuple[int, ...]
    """Ranks that hold these parameters, ascending."""
    parameters: tuple[OwnedParameter, ...]
    gradient: torch.Tensor
    """(number of elements,) fp32: all gradients, flat."""
    pending: set[int] = field(default_factory=set)
    """Blocks whose backward of the last micro-batch is not done yet."""


class GradientSync:
    """Owns the gradients of one rank and sums them over their owners."""

    def __init__(
        self,
        parameters: Sequence[OwnedParameter],
        *,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        groups: Groups,
        journal: Journal,
        block_is_done: Callable[[int], None],
    ) -> None:
        """``block_is_done`` is called after each block's backward of each micro-batch."""
        self._rank = rank
        self._groups = groups
        self._journal = journal
        self._block_is_done = block_is_done
        self._num_micro_batches = plan.pipelines[plan.ranks[rank].pipeline].micro_batches
        self._parameters_of = Counter(p.block for p in parameters)
        self._accumulated: Counter[int] = Counter()
        self._num_launched = 0
        self._works: list[dist.Work] = []
        self.buckets = _make_buckets(parameters, plan=plan, spec=spec)
        """In the order in which they are launched."""
        for owned in parameters:
            owned.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's has no types
                partial(self._gradient_is_added, owned.block)
            )

    def begin(self) -> None:
        """Start a step: gradients are zero, nothing is launched."""
        self._accumulated.clear()
        self._num_launched = 0
        for bucket in self.buckets:
            bucket.gradient.zero_()
            bucket.pending = {p.block for p in bucket.parameters}

    def finish(self) -> None:
        """Wait until all gradients are those of the global batch."""
        assert self._num_launched == len(self.buckets)  # every micro-batch went backward
        self._journal.begin("SYNC", waits=True)
        start = time.time()
        while self._works:
            self._works.pop(0).wait()
        self._journal.span("SYNC_WAIT", start)

    def norm_squared(self) -> torch.Tensor:
        """Squared norm of the gradients that this rank counts, fp64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].gradient.device)
        for bucket in self._counted_buckets():
            total += torch.linalg.vector_norm(bucket.gradient, dtype=torch.float64).square()
        return total

    def counted_parameters(self) -> tuple[OwnedParameter, ...]:
        """The parameters that this rank answers for; each is one rank's in the world."""
        return tuple(p for bucket in self._counted_buckets() for p in bucket.parameters)

    def _counted_buckets(self) -> list[Bucket]:
        # Of equal copies, that of the lowest owner counts.
        return [bucket for bucket in self.buckets if bucket.owners[0] == self._rank]

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.gradient.mul_(factor)

    def _gradient_is_added(self, block: int, _: nn.Parameter) -> None:
        self._accumulated[block] += 1
        num_done, rest = divmod(self._accumulated[block], self._parameters_of[block])
        if rest:
            return
        self._block_is_done(block)
        if num_done == self._num_micro_batches:
            for bucket in self.buckets:
                bucket.pending.discard(block)
            self._launch_ready()

    def _launch_ready(self) -> None:
        """Launch in the canonical order only: a bucket that is early waits for those before it."""
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if bucket.pending:
                return
            self._num_launched += 1
            if len(bucket.owners) > 1:
                self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        start = time.time()
        work = dist.all_reduce(
            bucket.gradient,
            op=dist.ReduceOp.SUM,
            group=self._groups.owners[bucket.owners],
            async_op=True,
        )
        assert work is not None  # this rank is a member of the group
        self._works.append(work)
        # On CPU the future is done when the sum is; on CUDA when it stands in the stream.
        work.get_future().add_done_callback(
            lambda _: self._journal.span("SYNC", start, blocks=bucket.blocks)
        )


def _make_buckets(
    parameters: Sequence[OwnedParameter], *, plan: Plan, spec: ModelSpec
) -> tuple[Bucket, ...]:
    """One bucket for each of this rank's segments, by descending block; a tied weight last."""
    buckets = []
    for segment in reversed(plan.segments):
        inside = [
            p
            for p in parameters
            if segment.start <= p.block < segment.stop and not _is_tied(p, spec)
        ]
        buckets.append(_make_bucket(inside, (segment.start, segment.stop), segment.owners))
    tied = [p for p in parameters if _is_tied(p, spec)]
    buckets.append(_make_bucket(tied, (0, spec.num_blocks), tied_owners(plan, spec)))
    return tuple(bucket for bucket in buckets if bucket.parameters)


def _is_tied(owned: OwnedParameter, spec: ModelSpec) -> bool:
    return spec.tied and owned.name == TIED_WEIGHT


def _make_bucket(
    parameters: Sequence[OwnedParameter], blocks: tuple[int, int], owners: tuple[int, ...]
) -> Bucket:
    sizes = [p.parameter.numel() for p in parameters]
    device = parameters[0].parameter.device if parameters else torch.device("cpu")
    gradient = torch.zeros(sum(sizes), device=device)
    for owned, piece in zip(parameters, torch.split(gradient, sizes), strict=True):
        # Autograd adds to an existing gradient in place, so the piece stays the gradient.
        owned.parameter.grad = piece.view_as(owned.parameter)
    return Bucket(blocks=blocks, owners=owners, parameters=tuple(parameters), gradient=gradient)
