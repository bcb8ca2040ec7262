"""Which elements of a parameter a rank holds, in boxes; the arithmetic of widths and shards.

At tensor-parallel width t a parameter is shared out along one dimension, or whole on every rank.
The fused ``qkv`` matrix has three sections (query, key and value heads), each of which is shared
out by itself. Part i of n of a section of size s is ``[i * s // n, (i + 1) * s // n)``: part i of t
consists of parts of any multiple of t, so stages of different widths meet at the least common
multiple of them. Needs no torch but for views of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A range along one dimension, in the tensor that a rank holds and in the full parameter."""

    dim: int
    local: int
    """Where it starts in the rank's tensor."""
    start: int
    """Where it starts in the full parameter."""
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of the rank's tensor, a view."""
        return tensor.narrow(self.dim, self.local, self.length) if tensor.dim() else tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one parameter is shared out, and which part of it is this rank's."""

    shape: tuple[int, ...]
    """Of the full parameter."""
    dim: int | None = None
    """The dimension that is shared out; None: every rank holds all of it."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are shared out one by one; they sum to its size."""
    width: int = 1
    """Ranks that share it."""
    index: int = 0
    """This rank among them."""

    @property
    def is_shared_out(self) -> bool:
        """Whether the ranks of a group hold different parts."""
        return self.dim is not None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the tensor that this rank holds."""
        if self.dim is None:
            return self.shape
        held = sum(box.length for box in self.boxes())
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def boxes(self, parts: tuple[int, int] | None = None, of: int | None = None) -> list[Box]:
        """What this rank holds of parts ``[first, last)`` of all ``of`` parts; None: all it holds.

        ``of`` is a multiple of the width, and the parts lie within the rank's own. In the order of
        the rank's tensor.
        """
        if self.dim is None:
            return [Box(dim=0, local=0, start=0, length=self.shape[0] if self.shape else 1)]
        if of is None or parts is None:
            parts, of = (self.index, self.index + 1), self.width
        boxes = []
        local = full = 0
        for size in self.sections:
            own, own_stop = _part(size, self.index, self.width)
            start, stop = parts[0] * size // of, parts[1] * size // of
            boxes.append(
                Box(
                    dim=self.dim,
                    local=local + start - own,
                    start=full + start,
                    length=stop - start,
                )
            )
            local, full = local + own_stop - own, full + size
        return boxes

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full parameter."""
        if self.dim is None:
            return full
        parts = [full.narrow(self.dim, box.start, box.length) for box in self.boxes()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def offsets(self, box: Box) -> tuple[int, ...]:
        """Where a box starts in the full parameter."""
        if not self.shape:
            return ()
        return tuple(box.start if d == box.dim else 0 for d in range(len(self.shape)))

    def sizes(self, box: Box) -> tuple[int, ...]:
        """Shape of a box."""
        if not self.shape:
            return ()
        return tuple(box.length if d == box.dim else n for d, n in enumerate(self.shape))


def _part(size: int, index: int, count: int) -> tuple[int, int]:
    return index * size // count, (index + 1) * size // count


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A box within a tensor that was cut out of its flat elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    """Its first element among all flat ones; its others follow."""


def cuts_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Cut]:
    """The boxes that elements ``[start, stop)`` of a tensor consist of, in row-major order.

    At most ``2 * dimensions - 1``: of a matrix, the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Cut(
            offsets=(start,) if shape else (), sizes=(stop - start,) if shape else (), first=start
        )
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Cut(offsets=(first, *zeros), sizes=(last - first, *shape[1:]), first=first * row)
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Cut]:
    base = index * math.prod(shape[1:])
    for cut in cuts_of(shape[1:], start - base, stop - base):
        yield Cut(offsets=(index, *cut.offsets), sizes=(1, *cut.sizes), first=base + cut.first)
