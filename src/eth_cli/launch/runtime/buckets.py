"""Buckets: the gradients that one set of ranks sums in one collective, and where they lie.

A bucket's gradients lie in one flat buffer whose pieces are the parameters' ``.grad``, so nothing
is copied. Only where a stage is narrower than another that holds the same blocks, its parameters
are summed in several parts with different ranks, and each part is copied to a buffer of its own.

All owners of a segment make the same buckets of it, from the same shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from eth_cli.buckets import GRADIENT_BYTES, runs
from eth_cli.launch.runtime.groups import Groups
from eth_cli.launch.runtime.layout import Box
from eth_cli.launch.runtime.segments import Part, SyncSegment
from eth_cli.launch.runtime.stage import OwnedParameter
from eth_cli.model import ModelSpec
from eth_cli.models.build import TIED_WEIGHT


class Piece(NamedTuple):
    """A box of a parameter, and where its gradient lies in a bucket."""

    owned: OwnedParameter
    box: Box
    start: int
    stop: int
    """Elements ``[start, stop)`` of the bucket, row-major."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """The gradients that one set of owners sums together."""

    blocks: tuple[int, int]
    """Half-open range of blocks that the gradients come from."""
    owners: tuple[int, ...]
    """Ranks that hold these elements, ascending."""
    group: dist.ProcessGroup | None
    """Of the owners; None where nothing has to be summed."""
    pieces: tuple[Piece, ...]
    flat: torch.Tensor
    """(elements, rounded up to a multiple of the owners where they split them,) fp32."""
    is_copy: bool
    """Whether the parameters' gradients lie elsewhere."""
    contributes: bool
    """Whether this rank adds its own gradients; of those that all devices of a stage compute alike,
    only the first does."""
    chunk: torch.Tensor | None = None
    """(elements / owners,) fp32: the summed gradients that this owner updates parameters with,
    where owners split the update; None where each updates everything."""
    pending: set[int] = field(default_factory=set)
    """Blocks whose backward of the last micro-batch is not done yet."""

    @property
    def parameters(self) -> tuple[OwnedParameter, ...]:
        """The parameters that it holds gradients of, in their order."""
        return tuple(dict.fromkeys(piece.owned for piece in self.pieces))

    def pack(self) -> None:
        """Copy the gradients in, where they lie elsewhere."""
        if self.is_copy:
            for piece in self.pieces:
                gradient = piece.owned.parameter.grad
                assert gradient is not None
                part = piece.box.of(gradient)
                self.flat[piece.start : piece.stop].view(part.shape).copy_(part)

    def unpack(self) -> None:
        """Copy the sums back."""
        if self.is_copy:
            for piece in self.pieces:
                gradient = piece.owned.parameter.grad
                assert gradient is not None
                part = piece.box.of(gradient)
                part.copy_(self.flat[piece.start : piece.stop].view(part.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """How buckets are made."""

    segments: tuple[SyncSegment, ...]
    bucket_bytes: float
    """Most bytes of fp32 gradients in a bucket, for each group that sums it; a block that has more
    is a bucket of its own."""
    is_sharded: bool = False
    """Whether owners split the update of what they sum."""


def make_buckets(
    parameters: Sequence[OwnedParameter],
    plan: BucketPlan,
    *,
    spec: ModelSpec,
    rank: int,
    groups: Groups,
) -> tuple[tuple[Bucket, ...], tuple[torch.Tensor, ...]]:
    """One rank's buckets in the order in which all ranks launch theirs, and all its gradients.

    The order is that of the segments, inside a segment by descending block, then the parts of
    shared-out parameters ascending, then what every device holds.

    Returns:
        The buckets; the flat tensors that all gradients lie in, to be set to zero for a new step.
    """
    buckets: list[Bucket] = []
    stores: list[torch.Tensor] = []
    left = list(parameters)
    has_tied_segment = any(segment.is_tied for segment in plan.segments)
    for segment in plan.segments:
        group = next((g for g in segment.groups if rank in g), None)
        if group is None:
            continue
        inside = [p for p in left if _belongs(p, segment, spec, has_tied_segment)]
        for together in _runs(
            inside, bucket_bytes=plan.bucket_bytes, num_owners=len(segment.groups)
        ):
            made = _Maker(segment, group, rank, groups, is_sharded=plan.is_sharded)
            buckets += made.buckets(together)
            stores += made.stores
    return tuple(buckets), tuple(stores)


def _belongs(
    owned: OwnedParameter, segment: SyncSegment, spec: ModelSpec, has_tied_segment: bool
) -> bool:
    is_tied = has_tied_segment and spec.tied and owned.name == TIED_WEIGHT
    if is_tied or segment.is_tied:
        return is_tied and segment.is_tied
    return segment.blocks[0] <= owned.block < segment.blocks[1]


def _runs(
    parameters: Sequence[OwnedParameter], *, bucket_bytes: float, num_owners: int
) -> Iterator[list[OwnedParameter]]:
    """Whole blocks, by descending block, as many as a bucket may hold; at least one."""
    ordered = sorted(parameters, key=lambda p: (-p.block, p.name))
    blocks = [list(block) for _, block in itertools.groupby(ordered, key=lambda p: p.block)]
    sizes = [GRADIENT_BYTES * sum(math.prod(p.layout.shape) for p in block) for block in blocks]
    for start, stop in runs(sizes, bucket_bytes=bucket_bytes, num_owners=num_owners):
        yield list(itertools.chain.from_iterable(blocks[start:stop]))


class _Maker:
    """Makes the buckets of some blocks of a segment on one rank."""

    def __init__(
        self,
        segment: SyncSegment,
        group: tuple[int, ...],
        rank: int,
        groups: Groups,
        *,
        is_sharded: bool,
    ) -> None:
        self._segment = segment
        self._index = group.index(rank)
        self._rank = rank
        self._width = len(group)
        self._groups = groups
        self._is_sharded = is_sharded
        self.stores: list[torch.Tensor] = []

    def buckets(self, parameters: Sequence[OwnedParameter]) -> list[Bucket]:
        segment = self._segment
        if segment.num_parts == 1:
            return [self._holding(parameters, segment.owners)]
        shared = [p for p in parameters if p.layout.is_shared_out]
        whole = [p for p in parameters if not p.layout.is_shared_out]
        mine = [part for part in segment.parts if self._rank in part.owners]
        if not shared:
            found = []
        elif len(mine) == 1:
            found = [self._holding(shared, mine[0].owners)]
        else:
            self._store_elsewhere(shared)
            found = [self._copying(shared, part) for part in mine]
        if whole:
            found.append(self._holding(whole, segment.owners, is_alike=True))
        return found

    def _group_of(self, owners: tuple[int, ...]) -> dist.ProcessGroup | None:
        # The devices of one stage compute the same gradients of what each of them holds.
        return self._groups.owners[owners] if len(self._segment.groups) > 1 else None

    def _holding(
        self,
        parameters: Sequence[OwnedParameter],
        owners: tuple[int, ...],
        *,
        is_alike: bool = False,
    ) -> Bucket:
        """A bucket in which the gradients themselves lie."""
        pieces = _pieces([(p, p.layout.boxes()) for p in parameters])
        bucket = self._bucket(pieces, owners, is_copy=False)
        bucket.contributes = not is_alike or self._index == 0
        self.stores.append(bucket.flat)
        start = 0
        for owned in parameters:
            stop = start + owned.parameter.numel()
            # Autograd adds to an existing gradient in place, so the piece stays the gradient.
            owned.parameter.grad = bucket.flat[start:stop].view_as(owned.parameter)
            start = stop
        return bucket

    def _store_elsewhere(self, parameters: Sequence[OwnedParameter]) -> None:
        for owned in parameters:
            gradient = torch.zeros_like(owned.parameter, dtype=torch.float32, requires_grad=False)
            owned.parameter.grad = gradient
            self.stores.append(gradient)

    def _copying(self, parameters: Sequence[OwnedParameter], part: Part) -> Bucket:
        """A bucket that some parts of the gradients are copied to."""
        num_parts = self._segment.num_parts
        pieces = _pieces([(p, p.layout.boxes(part.parts, num_parts)) for p in parameters])
        return self._bucket(pieces, part.owners, is_copy=True)

    def _bucket(
        self, pieces: tuple[Piece, ...], owners: tuple[int, ...], *, is_copy: bool
    ) -> Bucket:
        group = self._group_of(owners)
        size = pieces[-1].stop
        device = pieces[0].owned.parameter.device
        chunk = None
        if self._is_sharded and group is not None:
            chunk = torch.zeros(-(-size // len(owners)), device=device)
            size = len(chunk) * len(owners)
        blocks = self._segment.blocks
        if not self._segment.is_tied:
            present = [piece.owned.block for piece in pieces]
            blocks = (min(present), max(present) + 1)
        return Bucket(
            blocks=blocks,
            owners=owners,
            group=group,
            pieces=pieces,
            flat=torch.zeros(size, device=device),
            is_copy=is_copy,
            contributes=True,
            chunk=chunk,
        )


def _pieces(boxes: Sequence[tuple[OwnedParameter, list[Box]]]) -> tuple[Piece, ...]:
    found = []
    start = 0
    for owned, of_parameter in boxes:
        for box in of_parameter:
            stop = start + math.prod(owned.layout.sizes(box))
            found.append(Piece(owned, box, start, stop))
            start = stop
    return tuple(found)
