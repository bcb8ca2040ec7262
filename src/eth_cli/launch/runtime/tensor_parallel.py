"""Blocks split over the devices of a stage (Shoeybi et al. 2019, "Megatron-LM", section 3).

Query, key, value, gate and up projections are split by output rows, the two projections back to the
hidden size by input columns, embedding and head by rows of the vocabulary. So a layer needs two
all-reduces of (B, S, H) forward and two backward; norms are computed by every device alike.

Written with plain collectives, not with DTensor's parallel styles: those would cut the fused
``qkv`` matrix across its sections, keep gradients as DTensors, which cannot be pieces of the flat
buffers that are summed between stages of other widths, and refuse a vocabulary that the width does
not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by

from eth_cli.launch.runtime.layout import Layout
from eth_cli.model import ModelSpec

_ROWS = (
    "token.weight",
    "weight",
    "attention.qkv.weight",
    "attention.qkv.bias",
    "mlp.gate.weight",
    "mlp.gate.bias",
    "mlp.up.weight",
    "mlp.up.bias",
)
"""Parameters that are split by rows, by their names in a block; ``weight`` is the head's."""
_COLUMNS = ("attention.out.weight", "mlp.down.weight")
"""Parameters that are split by columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """The ranks that share a stage, as one of them sees them."""

    width: int = 1
    index: int = 0
    """Of this rank."""
    group: dist.ProcessGroup | None = None
    """Their process group; None at width 1."""


def layout_of(
    spec: ModelSpec, local_name: str, shape: tuple[int, ...], *, width: int, index: int
) -> Layout:
    """How a parameter of a block is shared out, from its name in the block and its full shape."""
    if local_name in _ROWS:
        return Layout(
            shape=shape,
            dim=0,
            sections=_sections(spec, local_name, shape),
            width=width,
            index=index,
        )
    if local_name in _COLUMNS:
        return Layout(shape=shape, dim=1, sections=(shape[1],), width=width, index=index)
    return Layout(shape=shape)


def _sections(spec: ModelSpec, local_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not local_name.startswith("attention.qkv"):
        return (shape[0],)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return tuple(n * spec.head_dim for n in heads)


def local_spec(spec: ModelSpec, *, width: int, index: int) -> ModelSpec:
    """The model whose blocks have the shapes that one device of a group holds."""
    if width == 1:
        return spec

    def part(size: int) -> int:
        return (index + 1) * size // width - index * size // width

    return spec.model_copy(
        update={
            "num_heads": spec.num_heads // width,
            "num_kv_heads": spec.num_kv_heads // width,
            "ffn_size": part(spec.ffn_size),
            "vocab_size": part(spec.vocab_size),
        }
    )


# --- Collectives that autograd knows --------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """What every device has, into what each does a part of: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum of what each device has computed, for all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def copy_to_group(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """x, whose gradient is the sum of the gradients of all devices of the group."""
    return x if tensor.group is None else _Copy.apply(x, tensor.group)  # type: ignore[no-untyped-call] # torch's has no types


def sum_over_group(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """The sum of x over the devices of the group; its gradient is each device's own."""
    return x if tensor.group is None else _Sum.apply(x, tensor.group)  # type: ignore[no-untyped-call] # torch's has no types


# --- Parts of blocks ------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """A projection of which this device has some input columns; the bias is added once."""

    def __init__(self, linear: nn.Linear, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._tensor = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, part) -> (B, S, H)."""
        total = sum_over_group(F.linear(x, self.weight), self._tensor)
        return total if self.bias is None else total + self.bias  # type: ignore[redundant-expr] # torch's type leaves None out


class RowEmbedding(nn.Module):
    """A look-up table of which this device has some rows."""

    def __init__(self, table: nn.Embedding, tensor: TensorGroup, *, first: int) -> None:
        super().__init__()
        self.weight = table.weight
        self._first = first
        self._tensor = tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 -> (B, S, H)."""
        rows = tokens - self._first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return sum_over_group(found.masked_fill(elsewhere[..., None], 0), self._tensor)


class _SharedNorm(nn.Module):
    """A norm that each device applies to its own heads: all add to its weight's gradient."""

    def __init__(self, norm: nn.RMSNorm, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight = norm.weight
        self._shape, self._epsilon = norm.normalized_shape, norm.eps
        self._tensor = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends with the weight's -> the same."""
        weight = copy_to_group(self.weight, self._tensor)
        return F.rms_norm(x, list(self._shape), weight, self._epsilon)


def parallelise(block: nn.Module, tensor: TensorGroup, *, vocab_first: int) -> None:
    """Make a block that was built with `local_spec` one of a group.

    Args:
        vocab_first: the vocabulary's first row that this device holds.
    """
    if tensor.group is None:
        return
    attention, mlp = getattr(block, "attention", None), getattr(block, "mlp", None)
    if attention is not None:
        attention.out = ColumnLinear(attention.out, tensor)
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            if norm is not None:
                setattr(attention, name, _SharedNorm(norm, tensor))
    if mlp is not None:
        mlp.down = ColumnLinear(mlp.down, tensor)
    for part in (attention, mlp):
        if part is not None:
            part.register_forward_pre_hook(
                lambda _, inputs: (copy_to_group(inputs[0], tensor), *inputs[1:])
            )
    if isinstance(getattr(block, "token", None), nn.Embedding):
        block.token = RowEmbedding(block.token, tensor, first=vocab_first)  # type: ignore[arg-type] # checked
