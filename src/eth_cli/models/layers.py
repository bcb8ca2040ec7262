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

from eth_cli.model import ModelSpec, RopeScaling, window_chunks
from eth_cli.models.rope import inverse_frequencies

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
        self.rope_scaling = spec.rope_scaling
        self.window = spec.attention_window
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
            self.num_heads * self.head_dim,
            spec.hidden_size,
            bias=gpt or spec.out_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            epsilon = spec.norm_epsilon
            self.q_norm = nn.RMSNorm(self.head_dim, eps=epsilon, dtype=dtype, device=device)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=epsilon, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        num_samples, seq_len, _ = x.shape
        # Heads stay behind the positions until the attention itself: its output then has that
        # layout too, and flattening the heads again needs no copy.
        heads = self.qkv(x).view(num_samples, seq_len, -1, self.head_dim)
        query, key, value = heads.split(  # (B, S, N, D), (B, S, K, D), (B, S, K, D)
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rope_theta is not None:
            cos, sin = rotary_table(
                seq_len,
                self.head_dim,
                theta=self.rope_theta,
                scaling=self.rope_scaling,
                dtype=x.dtype,
                device=x.device,
            )
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = attend(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), window=self.window
        )
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return] # Module.__call__ has no type


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int | None
) -> torch.Tensor:
    """Causal attention, each token to the last ``window`` of those up to itself (None: to all).

    Shapes: (B, N, S, D), (B, K, S, D), (B, K, S, D) -> (B, N, S, D).

    With a window the sequence is cut into chunks no shorter than it: each attends to itself and the
    one before it, all under one mask of 2 x chunk^2 elements, and no S x S mask or score matrix
    is made.
    """
    gqa = query.shape[1] != key.shape[1]
    seq_len = query.shape[2]
    if window is None or seq_len <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
    num_chunks, length = window_chunks(seq_len, window)
    # What is added at the end lies in every real token's future, so it needs no mask of its own.
    pad = (0, 0, 0, num_chunks * length - seq_len)
    query, key, value = F.pad(query, pad), F.pad(key, pad), F.pad(value, pad)
    mask = _window_mask(length, window, dtype=query.dtype, device=query.device)
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, :length],
            key[:, :, :length],
            value[:, :, :length],
            attn_mask=mask[:, length:],
            enable_gqa=gqa,
        )
    ]
    if num_chunks > 1:
        later = F.scaled_dot_product_attention(
            _chunks(query[:, :, length:], length, length),
            _chunks(key, 2 * length, length),
            _chunks(value, 2 * length, length),
            attn_mask=mask,
            enable_gqa=gqa,
        )
        num_samples, heads, _, size = query.shape
        later = later.view(num_samples, num_chunks - 1, heads, length, size).transpose(1, 2)
        parts.append(later.reshape(num_samples, heads, -1, size))
    return torch.cat(parts, dim=2)[:, :, :seq_len]


def _chunks(x: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Slices of ``size`` positions, one each ``step``: (B, N, S, D) -> (B x slices, N, size, D)."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _window_mask(
    length: int, window: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What is added to the scores of a chunk with the one before it and itself, (L, 2L)."""
    queries = torch.arange(length, 2 * length, device=device)[:, None]
    keys = torch.arange(2 * length, device=device)
    distance = queries - keys
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(length, 2 * length, dtype=dtype, device=device).masked_fill(
        hidden, float("-inf")
    )


def rotary_table(
    seq_len: int,
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, (S, D/2) each.

    Dimension pair i of position p turns by p x theta^(-2i/D) (Su et al. 2021, "RoFormer",
    section 3.2.2), or less where the positions are scaled. Angles are computed in fp32 and rounded
    once. They are computed anew in each forward: that is S x D/2 cosines, nothing beside the matrix
    products, and a cache would have to be shared between the blocks of a process or be held once
    for each.
    """
    frequencies = inverse_frequencies(head_dim, theta=theta, scaling=scaling, device=device)
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos.to(dtype), sin.to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) of every head by its position's angle: (B, S, N, D).

    Pairing the two halves, not neighbours, is the layout of Llama weights in Hugging Face files.
    """
    cos, sin = cos[:, None], sin[:, None]  # (S, 1, D/2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
