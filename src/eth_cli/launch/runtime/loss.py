"""The head's loss: a sum over tokens, in chunks if wished, over a split vocabulary if it is one.

Shapes: N tokens, H width of the head's input, V rows of the vocabulary that this device holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by
from torch.utils.checkpoint import checkpoint

from eth_cli.launch.dataset import IGNORED_LABEL
from eth_cli.launch.runtime.tensor_parallel import TensorGroup, copy_to_group


class _SplitCrossEntropy(torch.autograd.Function):
    """Sum of token losses over a vocabulary of which each device has some columns of the logits.

    log(sum of exp) needs the largest logit and the sum over all devices, the label's logit is on
    one of them (Megatron-LM's vocabulary-parallel cross-entropy). All in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest[:, None]).exp()
        columns = labels - first
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = columns.masked_fill(~here, 0)
        own = logits.gather(1, columns[:, None])[:, 0].masked_fill(~here, 0)
        sums = torch.stack([exponentials.sum(dim=-1), own])
        dist.all_reduce(sums, group=group)
        valid = labels != IGNORED_LABEL
        losses = sums[0].log() + largest - sums[1]
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), columns, here & valid, valid)
        return losses.masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, columns, here, valid = ctx.saved_tensors
        gradient = probabilities * valid[:, None]
        gradient.scatter_add_(1, columns[:, None], -here[:, None].to(gradient.dtype))
        return gradient * gradients[0], None, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tensor: TensorGroup, *, vocab_first: int = 0
) -> torch.Tensor:
    """Sum of the losses of all valid tokens, fp32 scalar: (N, V), (N,) int64 -> ().

    The same on every device of the group.
    """
    if tensor.group is None:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return _SplitCrossEntropy.apply(logits.float(), labels, vocab_first, tensor.group)  # type: ignore[no-any-return,no-untyped-call] # torch's has no types


def projected_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tensor: TensorGroup,
    *,
    vocab_first: int = 0,
    chunk: int = 0,
) -> torch.Tensor:
    """The same from what is multiplied with the head's weight: (N, H), (V, H), (N,) int64 -> ().

    Args:
        chunk: tokens whose logits exist at a time; they are computed again for the backward. 0: all
            at once, and none twice.
    """
    # Summed over the group once, not in each chunk.
    hidden = copy_to_group(hidden, tensor)
    loss_of = partial(_loss_of, tensor=tensor, vocab_first=vocab_first)
    if not chunk or chunk >= hidden.shape[0]:
        return loss_of(hidden, weight, labels)
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, of_rows in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True):
        total = total + checkpoint(
            loss_of, rows, weight, of_rows, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _loss_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    tensor: TensorGroup,
    vocab_first: int,
) -> torch.Tensor:
    return cross_entropy(F.linear(hidden, weight), labels, tensor, vocab_first=vocab_first)
