"""Which blocks' gradients are summed together: the rule that training follows and plans count on.

Inside a segment (blocks with the same owners) gradients are summed in buckets of whole blocks, by
descending block, each launched as soon as the backward of its lowest block is done. Small blocks
share a bucket, since every collective costs some latencies; a large one is a bucket by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

GRADIENT_BYTES = 4
"""Bytes of one gradient element, whatever dtype the blocks compute in: gradients are accumulated
over micro-batches in fp32, for bf16 and fp16 would lose small addends."""

BUCKET_BYTES = 16 * 2**20
"""Most gradients of a bucket for each stage that sums it, unless a run is told otherwise [bytes].

Of a bucket of n times as much a ring of n hands on pieces of this size, which fill a link whatever
n is; and it is far less than a stage of a model that needs many devices."""


def runs(
    block_bytes: Sequence[int], *, bucket_bytes: float, num_owners: int
) -> Iterator[tuple[int, int]]:
    """Half-open ranges of positions that make a bucket each, in order.

    Args:
        block_bytes: gradients of each block of a segment, in the order of the backward [bytes].
        bucket_bytes: most bytes of a bucket of several blocks, for each owner.
        num_owners: stages that hold the segment, one of each pipeline.
    """
    limit = bucket_bytes * num_owners
    start = held = 0
    for i, num_bytes in enumerate(block_bytes):
        if i > start and held + num_bytes > limit:
            yield start, i
            start, held = i, 0
        held += num_bytes
    if start < len(block_bytes):
        yield start, len(block_bytes)
