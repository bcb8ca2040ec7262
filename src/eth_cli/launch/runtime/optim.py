"""AdamW on the parameters that a rank updates, and the learning-rate schedule.

Every owner of a parameter updates its own copy from the same gradients with the same operations, so
copies stay equal bit by bit without being sent (between stages of different widths on CPUs to
rounding only: vector code treats the ends of tensors differently, and those differ).

Or the owners split the update of each bucket (Rajbhandari et al. 2020, "ZeRO", stage 1): each
updates an equal part of its flat elements, with moments (and in 16 bits master weights) of that
part only, and all gather the new weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from eth_cli.launch.config import RunOptions
from eth_cli.launch.runtime.buckets import Bucket
from eth_cli.launch.runtime.layout import Box, cuts_of
from eth_cli.launch.runtime.shards import key_of
from eth_cli.launch.runtime.stage import OwnedParameter

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for each element of a parameter; beside it ``step``, the updates it had."""


def learning_rate(options: RunOptions, step_index: int) -> float:
    """The rate of the step with this index, from 0.

    Linear warm-up from ``peak / warmup_steps`` to the peak, then half a cosine from the peak down
    to ``peak * final_learning_rate_ratio``, which the step after the last one would have.
    """
    peak = options.learning_rate
    if step_index < options.warmup_steps:
        return peak * (step_index + 1) / options.warmup_steps
    progress = (step_index - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    ratio = options.final_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """What is updated as one tensor: a parameter, or elements of a box of one."""

    owned: OwnedParameter
    master: torch.Tensor
    """The weights that are updated, fp32."""
    box: Box | None = None
    """The box that the elements belong to; None: this is all that the rank holds."""
    start: int = 0
    """The first element, of the box's, row-major; the others follow."""

    def parts(
        self, state: torch.Tensor, boxes: Iterable[Box] | None = None
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Where in the whole parameter each part of a state tensor belongs, and a view of it.

        Args:
            boxes: those to give of a whole parameter; None: all.
        """
        layout = self.owned.layout
        if self.box is None:
            for box in layout.boxes() if boxes is None else boxes:
                yield layout.offsets(box), box.of(state)
            return
        base = layout.offsets(self.box)
        for cut in cuts_of(layout.sizes(self.box), self.start, self.start + state.numel()):
            first = cut.first - self.start
            view = state[first : first + math.prod(cut.sizes)].view(cut.sizes)
            yield tuple(a + b for a, b in zip(base, cut.offsets, strict=True)), view


class _Update:
    """AdamW on some leaves; decay on matrices only, not on norms and biases."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        options: RunOptions,
        *,
        bucket: Bucket | None = None,
    ) -> None:
        self.leaves = tuple(leaves)
        self.bucket = bucket
        """The bucket whose elements these are, with those of its other owners."""
        groups: list[dict[str, object]] = []
        for is_matrix, decay in ((True, options.weight_decay), (False, 0.0)):
            masters = [
                leaf.master for leaf in leaves if (len(leaf.owned.layout.shape) >= 2) == is_matrix
            ]
            if masters:
                groups.append({"params": masters, "weight_decay": decay})
        self.adamw = None
        if groups:  # an owner may have padding only
            self.adamw = torch.optim.AdamW(
                groups,
                lr=options.learning_rate,
                betas=(options.beta1, options.beta2),
                eps=options.epsilon,
                fused=True,
            )
            # torch makes the state at the first step; a checkpoint is loaded into it before that.
            for leaf in leaves:
                self.adamw.state[leaf.master] = {
                    "step": torch.zeros((), device=leaf.master.device),
                    **{name: torch.zeros_like(leaf.master.detach()) for name in STATE_NAMES},
                }

    def step(self, rate: float) -> None:
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()

    def state(self, leaf: Leaf) -> dict[str, torch.Tensor]:
        assert self.adamw is not None  # it has a leaf
        state: dict[str, torch.Tensor] = self.adamw.state[leaf.master]
        return state


class Optimizer:
    """Updates what a rank holds."""

    def __init__(
        self,
        parameters: Sequence[OwnedParameter],
        buckets: Sequence[Bucket],
        options: RunOptions,
        *,
        rank: int,
        masters: Mapping[nn.Parameter, torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take over the gradients of all parameters.

        Args:
            masters: fp32 weights of the parameters that have fewer bits.
            dtype: what owners hand each other new weights in.
        """
        self._dtype = dtype
        self._options = options
        self._rank = rank
        self._buckets = tuple(buckets)
        self._updates: list[_Update] = []
        self.num_parameters = sum(p.parameter.numel() for p in parameters)
        """Parameters that each step updates."""
        split = [bucket for bucket in buckets if bucket.chunk is not None]
        for bucket in reversed(split):  # the next forward needs the first blocks first
            leaves = list(_leaves_of(bucket, rank, masters))
            self._updates.append(_Update(leaves, options, bucket=bucket))
        are_split = {owned.name for bucket in split for owned in bucket.parameters}
        own = [p for p in parameters if p.name not in are_split]
        if own:
            leaves = [Leaf(owned=p, master=_master(p, masters)) for p in own]
            self._updates.append(_Update(leaves, options))
        if split:
            others = sum(p.parameter.numel() for p in own)
            self.num_parameters = others + sum(
                leaf.master.numel() for u in self._updates if u.bucket for leaf in u.leaves
            )

    def step(self, step_index: int) -> None:
        """Update all parameters with the learning rate of the step with this index."""
        rate = learning_rate(self._options, step_index)
        gathering = []
        for update in self._updates:
            update.step(rate)
            gathering.append(_gather(update, self._dtype))
        for finish in gathering:
            finish()

    def publish(self) -> None:
        """Make the parameters those of the masters, after these were loaded."""
        for update in self._updates:
            _gather(update, self._dtype)()

    # --- Checkpoints --------------------------------------------------------------------------

    def saved_state(self) -> dict[str, torch.Tensor]:
        """The live tensors that this rank saves, by `shards.key_of`; others save the rest."""
        counted: dict[str, list[Box]] = {}
        for bucket in self._buckets:
            if bucket.chunk is None and bucket.owners[0] == self._rank:
                for piece in bucket.pieces:
                    counted.setdefault(piece.owned.name, []).append(piece.box)
        return self._state(counted)

    def loaded_state(self) -> dict[str, torch.Tensor]:
        """The live tensors that this rank needs of a checkpoint; then call `publish`."""
        return self._state(None)

    def _state(self, counted: Mapping[str, list[Box]] | None) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        number = 0
        for update in self._updates:
            for leaf in update.leaves:
                number += 1
                name, shape = leaf.owned.name, leaf.owned.layout.shape
                boxes = None
                if counted is not None and leaf.box is None:
                    boxes = counted.get(name, [])
                tensors = {"weight": leaf.master.detach(), **update.state(leaf)}
                steps = tensors.pop("step")
                for key, tensor in tensors.items():
                    for offsets, view in leaf.parts(tensor, boxes):
                        state[key_of(f"{key}.{name}", offsets, shape)] = view
                starts = [offsets for offsets, _ in leaf.parts(leaf.master, boxes)]
                if counted is None or any(not any(offsets) for offsets in starts):
                    state[key_of(f"step.{name}", (), (), number=number)] = steps
        return state


def _master(owned: OwnedParameter, masters: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """The fp32 weights of a parameter, with the parameter's gradient."""
    master = masters.get(owned.parameter)
    if master is None:
        return owned.parameter
    master.grad = owned.parameter.grad
    return master


def _leaves_of(
    bucket: Bucket, rank: int, masters: Mapping[nn.Parameter, torch.Tensor]
) -> Iterator[Leaf]:
    """This owner's elements of a bucket that its owners split."""
    assert bucket.chunk is not None
    size = len(bucket.chunk)
    first = bucket.owners.index(rank) * size
    for piece in bucket.pieces:
        start, stop = max(piece.start, first), min(piece.stop, first + size)
        if start >= stop:
            continue
        weights = masters.get(piece.owned.parameter)
        part = piece.box.of(piece.owned.parameter.detach() if weights is None else weights)
        master = part.reshape(-1)[start - piece.start : stop - piece.start]
        if weights is not None or not part.is_contiguous():
            master = master.clone()  # in place only in the parameter itself
        master.grad = bucket.chunk[start - first : stop - first]
        yield Leaf(owned=piece.owned, master=master, box=piece.box, start=start - piece.start)


def _gather(update: _Update, dtype: torch.dtype) -> Callable[[], None]:
    """Begin to make the parameters those of the masters; what is returned ends it."""
    bucket = update.bucket
    if bucket is None:
        with torch.no_grad():
            for leaf in update.leaves:
                if leaf.master is not leaf.owned.parameter:
                    leaf.owned.parameter.copy_(leaf.master)
        return lambda: None
    assert bucket.chunk is not None
    own = bucket.chunk.new_zeros(len(bucket.chunk), dtype=dtype)
    held = 0
    for leaf in update.leaves:
        own[held : held + leaf.master.numel()] = leaf.master
        held += leaf.master.numel()
    whole = own.new_empty(len(bucket.flat))
    work = dist.all_gather_into_tensor(whole, own, group=bucket.group, async_op=True)
    assert work is not None  # this rank is a member of the group

    def finish() -> None:
        work.wait()
        with torch.no_grad():
            for piece in bucket.pieces:
                part = piece.box.of(piece.owned.parameter)
                part.copy_(whole[piece.start : piece.stop].view(part.shape))

    return finish
