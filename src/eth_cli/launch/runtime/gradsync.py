"""Block-wise gradient sums over the owners of each segment, hidden under the backward pass.

Pipelines cut the model at different blocks, so gradients are summed segment by segment over the
ranks that own it, in `eth_cli.launch.runtime.buckets` of a stated size. A bucket's sum is launched
from the gradient hook that completes its last block, and waited for after the backward; the norm of
what has arrived is computed while the rest is on its way.

Deadlock: every rank launches its buckets in the order of `eth_cli.launch.runtime.segments`. Any two
ranks so launch the collectives that they share in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from eth_cli.launch.runtime.buckets import Bucket
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.runtime.stage import OwnedParameter

Mode = Literal["block", "layer", "whole"]
_NORM_ROW = 4096
"""Values whose squares are added up in fp32."""


def bucket_limit(mode: Mode, size_bytes: int) -> float:
    """Most bytes of a bucket: what was asked for, one block, or a whole segment."""
    return {"block": float(size_bytes), "layer": 0.0, "whole": float("inf")}[mode]


@dataclass(kw_only=True, slots=True)
class _Launched:
    """A collective under way."""

    bucket: Bucket
    work: dist.Work
    result: torch.Tensor
    """Where the sums arrive."""
    start_s: float
    is_told: bool
    """Whether the journal hears of its end by itself."""


class GradientSync:
    """Sums the gradients of one rank over their owners."""

    def __init__(
        self,
        parameters: Sequence[OwnedParameter],
        *,
        buckets: Sequence[Bucket],
        stores: Sequence[torch.Tensor],
        mode: Mode = "block",
        dtype: torch.dtype = torch.float32,
        num_micro_batches: int,
        rank: int,
        journal: Journal,
        block_is_done: Callable[[int], None],
    ) -> None:
        """``block_is_done`` is called after each block's backward of each micro-batch.

        Args:
            buckets: in the order in which they are launched.
            stores: all gradients, flat.
            mode: ``whole`` launches nothing before the backward is over.
            dtype: what gradients are summed in.
        """
        self.buckets = tuple(buckets)
        self._stores = tuple(stores)
        self._summed = self._stores
        if any(bucket.chunk is not None for bucket in buckets):
            self._summed = tuple(b.flat if b.chunk is None else b.chunk for b in buckets)
        self._mode = mode
        self._dtype = dtype
        self._rank = rank
        self._journal = journal
        self._block_is_done = block_is_done
        self._num_micro_batches = num_micro_batches
        self._parameters_of = Counter(p.block for p in parameters)
        self._accumulated: Counter[int] = Counter()
        self._num_launched = 0
        self._launched: list[_Launched] = []
        self._norm_squared = torch.zeros((), dtype=torch.float64)
        for owned in parameters:
            owned.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's has no types
                partial(self._gradient_is_added, owned.block)
            )

    def begin(self) -> None:
        """Start a step: gradients are zero, nothing is launched."""
        self._accumulated.clear()
        self._num_launched = 0
        for store in self._stores:
            store.zero_()
        for bucket in self.buckets:
            bucket.pending = {piece.owned.block for piece in bucket.pieces}

    def finish(self) -> None:
        """Wait until all gradients are those of the global batch."""
        if self._mode == "whole":
            self._launch_ready()
        assert self._num_launched == len(self.buckets)  # every micro-batch went backward
        self._journal.begin("SYNC", waits=True)
        start = time.time()
        self._norm_squared = torch.zeros(
            (), dtype=torch.float64, device=self.buckets[0].flat.device
        )
        for bucket in self.buckets:
            if bucket.group is None:
                self._add_norm(bucket)
        for launched in self._launched:
            self._complete(launched)
            self._add_norm(launched.bucket)
        self._launched.clear()
        self._journal.span("SYNC_WAIT", start)

    def norm_squared(self) -> torch.Tensor:
        """Squared norm of the gradients that this rank counts, fp64 scalar; after `finish`."""
        return self._norm_squared

    def scale(self, factor: float) -> None:
        """Multiply all summed gradients."""
        for tensor in self._summed:
            tensor.mul_(factor)

    def _add_norm(self, bucket: Bucket) -> None:
        if bucket.chunk is not None:
            counted = bucket.chunk  # each owner has elements of its own
        elif bucket.owners[0] == self._rank:
            counted = bucket.flat  # of equal copies, that of the lowest owner counts
        else:
            return
        self._norm_squared += squared_norm(counted)

    # --- Launching ----------------------------------------------------------------------------

    def _gradient_is_added(self, block: int, _: nn.Parameter) -> None:
        self._accumulated[block] += 1
        num_done, rest = divmod(self._accumulated[block], self._parameters_of[block])
        if rest:
            return
        self._block_is_done(block)
        if num_done == self._num_micro_batches:
            for bucket in self.buckets:
                bucket.pending.discard(block)
            if self._mode != "whole":
                self._launch_ready()

    def _launch_ready(self) -> None:
        """Launch in the canonical order only: a bucket that is early waits for those before it."""
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if bucket.pending:
                return
            self._num_launched += 1
            if bucket.group is not None:
                self._launch(bucket, bucket.group)

    @torch.no_grad()
    def _launch(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        start = time.time()
        bucket.pack()
        if not bucket.contributes:
            bucket.flat.zero_()
        sent = bucket.flat.to(self._dtype)
        if bucket.chunk is None:
            result = sent
            work = dist.all_reduce(sent, group=group, async_op=True)
        else:
            result = bucket.chunk if sent is bucket.flat else sent.new_empty(len(bucket.chunk))
            work = dist.reduce_scatter_tensor(result, sent, group=group, async_op=True)
        assert work is not None  # this rank is a member of the group
        launched = _Launched(bucket=bucket, work=work, result=result, start_s=start, is_told=False)
        # On CPU the future is done when the sum is; on CUDA when it stands in the stream. Gloo has
        # none for a reduce-scatter.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(
                lambda _: self._journal.span("SYNC", start, blocks=bucket.blocks)
            )
            launched.is_told = True
        self._launched.append(launched)

    def _complete(self, launched: _Launched) -> None:
        bucket = launched.bucket
        launched.work.wait()
        if not launched.is_told:
            self._journal.span("SYNC", launched.start_s, blocks=bucket.blocks)
        target = bucket.flat if bucket.chunk is None else bucket.chunk
        if launched.result is not target:
            target.copy_(launched.result)
        if bucket.chunk is None:
            bucket.unpack()


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat fp32 tensor, fp64 scalar.

    Norms of rows in fp32, their squares added up in fp64: as exact as the values themselves, and
    thirty times as fast on a CPU as a norm that converts every value.
    """
    num_rows, rest = divmod(values.numel(), _NORM_ROW)
    rows = values[: num_rows * _NORM_ROW].view(num_rows, _NORM_ROW)
    norms = [torch.linalg.vector_norm(rows, dim=1)] if num_rows else []
    if rest:
        norms.append(torch.linalg.vector_norm(values[num_rows * _NORM_ROW :])[None])
    if not norms:
        return values.new_zeros((), dtype=torch.float64)
    return torch.cat(norms).double().square().sum()
