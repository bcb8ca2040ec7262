"""What both families are made of: uninitialised layers, attention, activations.

Shapes: B micro-batch size, S sequence length, H hidden size, D head size, N query heads, K key and
value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by

from eth_cli.model import ModelSpec

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""Activation functions by their name in a `ModelSpec`."""


class Linear(nn.Linear):
    """A linear layer whose weights are left for `models.init` (or a checkpoint) to fill."""

    def reset_parameters(self) -> None:
        """Nothing: filling it twice costs time and would use the global random state."""


class Embedding(nn.Embedding):
    """A look-up table whose weights are left for `models.init` (or a checkpoint) to fill."""

    def reset_parameters(self) -> None:
        """Nothing, for the same reasons."""


class Attention(nn.Module):
    """Causal self-attention, grouped-query where the model has fewer key heads than query heads."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.rope_theta = spec.rope_theta if spec.family == "llama" else None
        gpt = spec.family == "gpt"
        heads = self.num_heads + 2 * self.num_kv_heads
        # Rows: all query heads, then all key heads, then all value heads.
        self.qkv = Linear(
            spec.hidden_size,
            heads * self.head_dim,
            bias=gpt or spec.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            self.num_heads * self.head_dim, spec.hidden_size, bias=gpt, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        num_samples, seq_len, _ = x.shape
        # Heads stay behind the positions until the attention itself: its output then has that
        # layout too, and flattening the heads again needs no copy.
        heads = self.qkv(x).view(num_samples, seq_len, -1, self.head_dim)
        query, key, value = heads.split(  # (B, S, N, D), (B, S, K, D), (B, S, K, D)
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2
        )
        if self.rope_theta is not None:
            cos, sin = rotary_table(
                seq_len, self.head_dim, theta=self.rope_theta, dtype=x.dtype, device=x.device
            )
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return] # Module.__call__ has no type


def rotary_table(
    seq_len: int, head_dim: int, *, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, (S, D/2) each.

    Dimension pair i of position p turns by p x theta^(-2i/D) (Su et al. 2021, "RoFormer",
    section 3.2.2). Angles are computed in fp32 and rounded once. They are computed anew in each
    forward: that is S x D/2 cosines, nothing beside the matrix products, and a cache would have to
    be shared between the blocks of a process or be held once for each.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, theta ** (-pairs / head_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) of every head by its position's angle: (B, S, N, D).

    Pairing the two halves, not neighbours, is the layout of Llama weights in Hugging Face files.
    """
    cos, sin = cos[:, None], sin[:, None]  # (S, 1, D/2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
